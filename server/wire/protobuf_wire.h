// SPDX-License-Identifier: Apache-2.0
//
// The parts of Protobuf's encoding that hand-written code relies on: tags, varints, and the field
// `raw`, which has the same number in AttendRequest and AttendResponse, as has `data` in the
// messages of AttendChunked. Pure.

#pragma once

#include <cstdint>

#include "attend/v1/attention.pb.h"

namespace attend::wire {

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroupBegin = 3,
  kGroupEnd = 4,
  kFixed32 = 5
};

inline constexpr uint64_t kRawField = v1::AttendRequest::kRawFieldNumber;
static_assert(kRawField == v1::AttendResponse::kRawFieldNumber);
// Size of `value` as a varint.
constexpr int64_t VarintBytes(uint64_t value) {
  int64_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

// Writes `value` as a varint and returns the end.
inline uint8_t* WriteVarint(uint64_t value, uint8_t* out) {
  for (; value >= 0x80; value >>= 7) *out++ = static_cast<uint8_t>(value | 0x80);
  *out++ = static_cast<uint8_t>(value);
  return out;
}

// The tag of a bytes field or submessage.
constexpr uint64_t BytesTag(uint64_t number) { return number << 3 | kBytes; }

inline constexpr uint64_t kRawTag = BytesTag(kRawField);

// Size of the tag and length before such a field's bytes.
constexpr int64_t PrefixBytes(uint64_t tag, int64_t bytes) {
  return VarintBytes(tag) + VarintBytes(static_cast<uint64_t>(bytes));
}
inline uint8_t* WritePrefix(uint64_t tag, int64_t bytes, uint8_t* out) {
  return WriteVarint(static_cast<uint64_t>(bytes), WriteVarint(tag, out));
}
inline constexpr int64_t kRawPrefixBytesMax = 12;
inline uint8_t* WriteRawPrefix(int64_t bytes, uint8_t* out) {
  return WritePrefix(kRawTag, bytes, out);
}

}  // namespace attend::wire
