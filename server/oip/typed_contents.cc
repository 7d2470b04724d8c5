// SPDX-License-Identifier: Apache-2.0

#include "server/oip/typed_contents.h"

#include <array>
#include <cstring>

#include "inference/grpc_service.pb.h"
#include "server/wire/protobuf_wire.h"
#include "server/wire/wire_fields.h"

namespace attend::oip {
namespace {

using Contents = inference::InferTensorContents;
constexpr int kFloats = Contents::kFp32ContentsFieldNumber;

Status MalformedContents(const std::string& what) {
  return InvalidArgument(what + ".contents is not an InferTensorContents");
}

// Calls take(field, reader) for each field `number` of the contents, with the reader at its value.
// Non-empty fields of other types are refused.
template <class Take>
Status ForEachField(std::span<const ByteSpan> slices, const MessagePart& contents, int number,
                    const std::string& what, const Take& take) {
  SliceReader reader(slices);
  reader.Skip(contents.offset);
  return wire::ForEachField(
      reader, contents.offset + contents.bytes,
      [&](const std::string&) { return MalformedContents(what); },
      [&](const wire::Field& field, const SliceReader&) {
        if (field.number == static_cast<uint64_t>(number)) return take(field, reader);
        if (field.bytes == 0) return Status();
        return InvalidArgument(what + ".contents has field " + std::to_string(field.number) +
                               ", must have field " + std::to_string(number) + " for its datatype");
      });
}

void Append(SliceReader& reader, int64_t bytes, std::vector<uint8_t>& out) {
  reader.ForEachPiece(
      bytes, [&out](ByteSpan piece) { out.insert(out.end(), piece.begin(), piece.end()); });
}

}  // namespace

std::optional<MessagePart> FindRun(std::span<const ByteSpan> slices, const MessagePart& contents) {
  if (contents.bytes == 0) return MessagePart{contents.offset, 0};
  SliceReader reader(slices);
  reader.Skip(contents.offset);
  wire::Field first;
  if (!wire::ReadField(reader, first).ok()) return std::nullopt;
  const int64_t end = contents.offset + contents.bytes;
  const bool whole = first.number == kFloats && first.type == wire::kBytes &&
                     first.bytes == end - reader.position();
  if (!whole) return std::nullopt;
  return MessagePart{reader.position(), first.bytes};
}

Status FindFloats(std::span<const ByteSpan> slices, const MessagePart& contents,
                  const std::string& what, int64_t message_bytes, std::vector<uint8_t>& tail,
                  MessagePart& found) {
  if (const std::optional<MessagePart> run = FindRun(slices, contents)) {
    found = *run;
    return Status();
  }
  const size_t before = tail.size();
  ATTEND_RETURN_IF_ERROR(ForEachField(
      slices, contents, kFloats, what, [&](const wire::Field& field, SliceReader& value) {
        if (field.type != wire::kBytes && field.type != wire::kFixed32)
          return MalformedContents(what);
        Append(value, field.bytes, tail);
        return Status();
      }));
  found = {message_bytes + static_cast<int64_t>(before),
           static_cast<int64_t>(tail.size() - before)};
  return Status();
}

Status TakeVarints(std::span<const ByteSpan> slices, const MessagePart& contents, int field,
                   const std::string& what, std::vector<uint8_t>& out, int64_t& entries) {
  return ForEachField(slices, contents, field, what,
                      [&](const wire::Field& each, SliceReader& value) {
                        if (each.type != wire::kBytes && each.type != wire::kVarint)
                          return MalformedContents(what);
                        const size_t before = out.size();
                        Append(value, each.bytes, out);
                        int length = 0;  // bytes of the current varint so far
                        for (size_t i = before; i < out.size(); ++i) {
                          constexpr int kVarintBytesMax = 10;
                          if (++length > kVarintBytesMax) return MalformedContents(what);
                          if (out[i] >= 0x80) continue;
                          length = 0;
                          ++entries;
                        }
                        return length == 0 ? Status() : MalformedContents(what);
                      });
}

Status EncodeVarints(SliceReader& reader, int64_t bytes, int width, const std::string& what,
                     std::vector<uint8_t>& out) {
  for (int64_t at = 0; at < bytes; at += width) {
    int64_t value = 0;
    if (width == 4) {
      int32_t narrow = 0;
      reader.Read(&narrow, sizeof(narrow));
      value = narrow;
    } else {
      reader.Read(&value, sizeof(value));
    }
    if (value < 0) {
      return InvalidArgument(what + "[" + std::to_string(at / width) + "] is " +
                             std::to_string(value) + ", must be at least 0");
    }
    std::array<uint8_t, 10> varint{};
    const uint8_t* const end = wire::WriteVarint(static_cast<uint64_t>(value), varint.data());
    out.insert(out.end(), varint.cbegin(), varint.cbegin() + (end - varint.data()));
  }
  return Status();
}

}  // namespace attend::oip
