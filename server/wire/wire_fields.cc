// SPDX-License-Identifier: Apache-2.0

#include "server/wire/wire_fields.h"

#include <string>

#include "server/wire/protobuf_wire.h"

namespace attend::wire {
namespace {

// Protobuf accepts tags and lengths of at most this many bytes.
constexpr int64_t kVarint32BytesMax = 5;

Status Truncated(uint64_t number, int64_t at) {
  return InvalidArgument("it ends inside field " + std::to_string(number) +
                         ", which begins at byte " + std::to_string(at));
}

Status NoField(int64_t at) { return InvalidArgument("no field at byte " + std::to_string(at)); }

Status ReadLength(SliceReader& reader, uint64_t number, int64_t at, int64_t& bytes) {
  const int64_t length_at = reader.position();
  uint64_t length = 0;
  if (!reader.ReadVarint(&length)) return Truncated(number, at);
  if (length > static_cast<uint64_t>(reader.remaining())) {
    return InvalidArgument("field " + std::to_string(number) + " at byte " + std::to_string(at) +
                           " declares " + std::to_string(length) + " bytes, " +
                           std::to_string(reader.remaining()) + " are left");
  }
  if (reader.position() - length_at > kVarint32BytesMax) return NoField(at);
  bytes = static_cast<int64_t>(length);
  return Status();
}

}  // namespace

Status ReadField(SliceReader& reader, Field& field) {
  const int64_t at = reader.position();
  uint64_t tag = 0;
  if (!reader.ReadVarint(&tag) || reader.position() - at > kVarint32BytesMax) return NoField(at);
  tag = static_cast<uint32_t>(tag);  // like Protobuf
  field.number = tag >> 3;
  field.type = tag & 7;
  if (field.number == 0) return NoField(at);
  switch (field.type) {
    case kVarint: {
      SliceReader value = reader;
      uint64_t unused = 0;
      if (!value.ReadVarint(&unused)) return Truncated(field.number, at);
      field.bytes = value.position() - reader.position();
      return Status();
    }
    case kFixed64:
    case kFixed32:
      field.bytes = field.type == kFixed64 ? 8 : 4;
      return field.bytes <= reader.remaining() ? Status() : Truncated(field.number, at);
    case kBytes:
      return ReadLength(reader, field.number, at, field.bytes);
    case kGroupBegin:
      return InvalidArgument("field " + std::to_string(field.number) + " at byte " +
                             std::to_string(at) + " is a group");
    default:
      return NoField(at);
  }
}

}  // namespace attend::wire
