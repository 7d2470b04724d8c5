// SPDX-License-Identifier: Apache-2.0

#include "server/wire/chunk_codec.h"

#include <array>
#include <string>
#include <utility>

#include "server/wire/protobuf_wire.h"
#include "server/wire/wire_fields.h"

namespace attend {
namespace {

using Message = v1::AttendChunkedRequest;

constexpr uint64_t kTensorTag = (Message::kTensorFieldNumber << 3) | wire::kVarint;
constexpr uint64_t kOffsetTag = (Message::kOffsetFieldNumber << 3) | wire::kVarint;
static_assert(wire::kRawField == Message::kDataFieldNumber);
static_assert(wire::kRawField == v1::AttendChunkedResponse::kDataFieldNumber);
static_assert(int{Message::kTensorFieldNumber} ==
              int{v1::AttendChunkedResponse::kTensorFieldNumber});
static_assert(int{Message::kOffsetFieldNumber} ==
              int{v1::AttendChunkedResponse::kOffsetFieldNumber});

// Number of token bytes kept. Longer than any valid token.
constexpr int64_t kTokenBytesKept = 64;

Status MalformedChunk(const std::string& what) {
  return InvalidArgument("the message is not an AttendChunkedRequest: " + what);
}

Status CheckSize(const char* what, int64_t bytes, int64_t bytes_max) {
  if (bytes <= bytes_max) return Status();
  return InvalidArgument(std::string("the ") + what + " has " + std::to_string(bytes) +
                         " bytes, must have at most " + std::to_string(bytes_max));
}

// Calls take(field, reader) for each field of a message.
template <class Take>
Status ForEachField(std::span<const ByteSpan> slices, const Take& take) {
  SliceReader reader(slices);
  return wire::ForEachField(
      reader, reader.remaining(), MalformedChunk,
      [&](const wire::Field& field, const SliceReader&) { return take(field, reader); });
}

bool Is(const wire::Field& field, int number, wire::WireType type) {
  return field.number == static_cast<uint64_t>(number) && field.type == type;
}

}  // namespace

Status FirstMessage::Parse(InMessage&& message, int64_t bytes_max) {
  message_bytes_ = message.size();
  ATTEND_RETURN_IF_ERROR(CheckSize("header", message_bytes_, bytes_max));
  slices_.Take(std::move(message));
  slices_.Own();  // the header is read again when it is admitted
  ATTEND_RETURN_IF_ERROR(ParseFields());
  return has_token_ ? Status() : ParseHeader();
}

Status FirstMessage::ParseFields() {
  int firsts = 0;
  bool chunk = false;
  const auto take = [&](const wire::Field& field, SliceReader value) {
    if (Is(field, Message::kTokenFieldNumber, wire::kBytes)) {
      ++firsts;
      has_token_ = true;
      token_.resize(static_cast<size_t>(std::min(field.bytes, kTokenBytesKept)));
      value.Read(token_.data(), static_cast<int64_t>(token_.size()));
    } else if (Is(field, Message::kHeaderFieldNumber, wire::kBytes)) {
      ++firsts;
      header_slices_.clear();
      value.ForEachPiece(field.bytes, [this](ByteSpan piece) { header_slices_.push_back(piece); });
    } else if (Is(field, Message::kTensorFieldNumber, wire::kVarint) ||
               Is(field, Message::kOffsetFieldNumber, wire::kVarint)) {
      uint64_t number = 0;
      (void)value.ReadVarint(&number);
      chunk |= number != 0;
    } else if (Is(field, Message::kDataFieldNumber, wire::kBytes)) {
      chunk |= field.bytes > 0;
    }
    return firsts > 1
               ? InvalidArgument("the stream's first message must have one header or one token")
               : Status();
  };
  ATTEND_RETURN_IF_ERROR(ForEachField(slices_.spans(), take));
  if (firsts == 0) {
    return InvalidArgument("the stream's first message has neither header nor token");
  }
  if (!chunk) return Status();
  return InvalidArgument("the stream's first message must have no chunk beside its header");
}

Status FirstMessage::ParseHeader() {
  header_.slices = header_slices_;
  ATTEND_RETURN_IF_ERROR(ScanMessage(header_.slices, header_.scan));
  return ParseMessage(arena_, header_);
}

Status ChunkMessage::Take(InMessage&& message, int64_t bytes_max) {
  ATTEND_RETURN_IF_ERROR(CheckSize("chunk's message", message.size(), bytes_max));
  slices_.Take(std::move(message));
  return Status();
}

Status ChunkMessage::ParseChunk(int64_t bytes_max) {
  const auto take = [this](const wire::Field& field, SliceReader value) {
    if (Is(field, Message::kHeaderFieldNumber, wire::kBytes) ||
        Is(field, Message::kTokenFieldNumber, wire::kBytes)) {
      return InvalidArgument("header and token belong only in the stream's first message");
    }
    if (Is(field, Message::kTensorFieldNumber, wire::kVarint)) {
      uint64_t tensor = 0;
      (void)value.ReadVarint(&tensor);
      tensor_ = static_cast<int>(tensor);
    } else if (Is(field, Message::kOffsetFieldNumber, wire::kVarint)) {
      (void)value.ReadVarint(&offset_);
    } else if (Is(field, Message::kDataFieldNumber, wire::kBytes)) {
      data_at_ = value.position();
      bytes_ = field.bytes;
    }
    return Status();
  };
  ATTEND_RETURN_IF_ERROR(ForEachField(slices_.spans(), take));
  if (bytes_ >= 1 && bytes_ <= bytes_max) return Status();
  return InvalidArgument("data has " + std::to_string(bytes_) + " bytes, must have 1 to " +
                         std::to_string(bytes_max));
}

std::vector<HostPiece> ChunkMessage::Pieces(void* to) const {
  std::vector<HostPiece> pieces;
  pieces.reserve(slices_.spans().size());
  SliceReader reader(slices_.spans());
  reader.Skip(data_at_);
  reader.ReadPieces(to, bytes_, pieces);
  return pieces;
}

OutMessage EncodeGrant(const std::string& token, int64_t streams_max, int64_t chunk_bytes_max,
                       int64_t idle_timeout_ms) {
  v1::AttendChunkedResponse response;
  v1::ChunkedGrant* grant = response.mutable_grant();
  grant->set_token(token);
  grant->set_streams_max(static_cast<int32_t>(streams_max));
  grant->set_chunk_bytes_max(chunk_bytes_max);
  grant->set_idle_timeout_ms(idle_timeout_ms);
  return OutMessage::Of(response.SerializeAsString());
}

OutMessage EncodeChunkedHeader(v1::AttendResponse* response) {
  v1::AttendChunkedResponse message;
  message.mutable_response()->Swap(response);
  return OutMessage::Of(message.SerializeAsString());
}

OutMessage EncodeChunk(v1::TensorName tensor, int64_t offset, MessagePiece data) {
  std::array<uint8_t, 2 + 11 + wire::kRawPrefixBytesMax> head;
  uint8_t* end = wire::WriteVarint(kTensorTag, head.data());
  end = wire::WriteVarint(static_cast<uint64_t>(tensor), end);
  end = wire::WriteVarint(kOffsetTag, end);
  end = wire::WriteVarint(static_cast<uint64_t>(offset), end);
  end = wire::WriteRawPrefix(static_cast<int64_t>(data.bytes.size()), end);
  OutMessage message = OutMessage::Of(std::string(head.data(), end));
  message.rest.push_back(std::move(data));
  return message;
}

}  // namespace attend
