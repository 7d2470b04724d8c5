// SPDX-License-Identifier: Apache-2.0
//
// The repeated numbers of a request (lengths, cumulative lengths, slopes, sinks), read in place in
// the message. If they were parsed, a one-byte number would take eight bytes or more of uncounted
// memory. Read here, they take none until they are written to the request's block, which the memory
// budget counts.
//
// A pure view; any thread.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <type_traits>

#include "server/wire/protobuf_wire.h"
#include "server/wire/slice_reader.h"
#include "server/wire/wire_fields.h"

namespace attend {

enum class ArrayField { kQLengths, kKvLengths, kCuQ, kCuKv, kAlibiSlopes, kSinks };
inline constexpr int kArrayFields = 6;
inline constexpr std::array<uint64_t, kArrayFields> kArrayNumbers = {
    v1::AttendRequest::kQLengthsFieldNumber,    v1::AttendRequest::kKvLengthsFieldNumber,
    v1::AttendRequest::kCuQFieldNumber,         v1::AttendRequest::kCuKvFieldNumber,
    v1::AttendRequest::kAlibiSlopesFieldNumber, v1::AttendRequest::kSinksFieldNumber};
// The others are int64.
constexpr bool IsFloatArray(int field) {
  return field >= static_cast<int>(ArrayField::kAlibiSlopes);
}

// The entries of one field: packed or single, possibly with other fields in between.
struct ArrayRun {
  int64_t begin = 0;  // position of the first tag in the message
  int64_t end = 0;    // position after the last entry
  int64_t entries = 0;
};
using ArrayRuns = std::array<ArrayRun, kArrayFields>;

class WireArrays {
 public:
  // `slices` and `runs`, the result of a scan of the same message, must outlive this.
  WireArrays(std::span<const ByteSpan> slices, const ArrayRuns& runs)
      : slices_(slices), runs_(runs) {}

  int64_t size(ArrayField field) const { return runs_[static_cast<int>(field)].entries; }

  // Calls visit(index, value) for each entry, in order, until it returns false. T is the field's
  // type: int64_t or float.
  template <class T, class Visit>
  void ForEach(ArrayField field, const Visit& visit) const;

 private:
  template <class T>
  static T ReadOne(SliceReader& reader);

  const std::span<const ByteSpan> slices_;
  const ArrayRuns& runs_;
};

template <class T>
T WireArrays::ReadOne(SliceReader& reader) {
  if constexpr (std::is_same_v<T, float>) {
    float value;
    reader.Read(&value, sizeof(value));
    return value;
  } else {
    uint64_t bits = 0;
    (void)reader.ReadVarint(&bits);
    return static_cast<int64_t>(bits);
  }
}

// The scan has checked that every number is complete.
template <class T, class Visit>
void WireArrays::ForEach(ArrayField field, const Visit& visit) const {
  const ArrayRun& run = runs_[static_cast<int>(field)];
  const uint64_t number = kArrayNumbers[static_cast<int>(field)];
  constexpr uint32_t kOne = std::is_same_v<T, float> ? wire::kFixed32 : wire::kVarint;
  SliceReader reader(slices_);
  reader.Skip(run.begin);
  int64_t index = 0;
  while (reader.position() < run.end) {
    wire::Field next;
    if (!wire::ReadField(reader, next).ok()) return;
    const int64_t end = reader.position() + next.bytes;
    if (next.number != number || (next.type != kOne && next.type != wire::kBytes)) {
      reader.Skip(next.bytes);
      continue;
    }
    while (reader.position() < end) {
      if (!visit(index++, ReadOne<T>(reader))) return;
    }
  }
}

}  // namespace attend
