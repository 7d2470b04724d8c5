// SPDX-License-Identifier: Apache-2.0
//
// The repeated numbers of a request (lengths, cumulative lengths, slopes, sinks) and the bits of
// its tree, read in place in the message. If they were parsed, a one-byte number would take eight
// bytes or more of uncounted memory. Read here, they take none until they are written to the
// request's block, which the memory budget counts.
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

enum class ArrayField {
  kQLengths,
  kKvLengths,
  kCuQ,
  kCuKv,
  kTreeLengths,
  kAlibiSlopes,
  kSinks,
  kTree
};
inline constexpr int kArrayFields = 8;
inline constexpr std::array<uint64_t, kArrayFields> kArrayNumbers = {
    v1::AttendRequest::kQLengthsFieldNumber,    v1::AttendRequest::kKvLengthsFieldNumber,
    v1::AttendRequest::kCuQFieldNumber,         v1::AttendRequest::kCuKvFieldNumber,
    v1::AttendRequest::kTreeLengthsFieldNumber, v1::AttendRequest::kAlibiSlopesFieldNumber,
    v1::AttendRequest::kSinksFieldNumber,       v1::AttendRequest::kTreeFieldNumber};
constexpr bool IsFloatArray(int field) {
  return field == static_cast<int>(ArrayField::kAlibiSlopes) ||
         field == static_cast<int>(ArrayField::kSinks);
}
// One field of bytes, not repeated: the message's last one counts.
constexpr bool IsByteArray(int field) { return field == static_cast<int>(ArrayField::kTree); }
// The others are int64.
constexpr int64_t ArrayEntryBytes(int field) {
  return IsByteArray(field) ? 1 : IsFloatArray(field) ? sizeof(float) : sizeof(int64_t);
}

// The entries of one field: packed or single, possibly with other fields in between. Those of a
// field of bytes are its bytes, and their first is where it begins.
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

  // Reads the entries of a field of numbers one after another.
  template <class T>
  class Cursor;
  template <class T>
  Cursor<T> Read(ArrayField field) const {
    return Cursor<T>(slices_, runs_[static_cast<int>(field)],
                     kArrayNumbers[static_cast<int>(field)]);
  }

  // Copies the bytes of a field of bytes.
  void ReadBytes(ArrayField field, void* to) const {
    const ArrayRun& run = runs_[static_cast<int>(field)];
    SliceReader reader(slices_);
    reader.Skip(run.begin);
    reader.Read(to, run.entries);
  }

 private:
  const std::span<const ByteSpan> slices_;
  const ArrayRuns& runs_;
};

// The scan has checked that every number is complete.
template <class T>
class WireArrays::Cursor {
 public:
  Cursor(std::span<const ByteSpan> slices, const ArrayRun& run, uint64_t number)
      : reader_(slices), end_(run.end), number_(number) {
    reader_.Skip(run.begin);
    field_end_ = run.begin;
  }

  // The next entry; false after the last one.
  bool Next(T& value) {
    constexpr uint32_t kOne = std::is_same_v<T, float> ? wire::kFixed32 : wire::kVarint;
    while (reader_.position() >= field_end_) {
      wire::Field next;
      if (reader_.position() >= end_ || !wire::ReadField(reader_, next).ok()) return false;
      field_end_ = reader_.position() + next.bytes;
      const bool ours = next.number == number_ && (next.type == kOne || next.type == wire::kBytes);
      if (!ours) reader_.Skip(next.bytes);
    }
    if constexpr (std::is_same_v<T, float>) {
      reader_.Read(&value, sizeof(value));
    } else {
      uint64_t bits = 0;
      (void)reader_.ReadVarint(&bits);
      value = static_cast<int64_t>(bits);
    }
    return true;
  }

 private:
  SliceReader reader_;
  const int64_t end_;
  const uint64_t number_;
  int64_t field_end_ = 0;  // of the field being read
};

template <class T, class Visit>
void WireArrays::ForEach(ArrayField field, const Visit& visit) const {
  Cursor<T> entries = Read<T>(field);
  T value;
  for (int64_t i = 0; entries.Next(value); ++i) {
    if (!visit(i, value)) return;
  }
}

}  // namespace attend
