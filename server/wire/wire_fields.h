// SPDX-License-Identifier: Apache-2.0
//
// Iterates over the fields of an encoded message without parsing them. Every declared length is
// compared with the bytes present. Pure.

#pragma once

#include <cstdint>
#include <string>

#include "kernels/util/status.h"
#include "server/wire/slice_reader.h"

namespace attend::wire {

struct Field {
  uint64_t number = 0;
  uint32_t type = 0;  // kVarint, kFixed64, kBytes or kFixed32
  int64_t bytes = 0;  // size of the value, after tag and length
};

// Reads a field up to its value, which is the next field.bytes bytes. INVALID_ARGUMENT describes,
// in one clause, an error that the generated parser would refuse too, or a group, which these
// messages do not have.
Status ReadField(SliceReader& reader, Field& field);

// Calls take(field, begin) for each field up to position `end`, with `reader` at the field's value
// and `begin` at its tag, then moves past the value. Returns the first error of `take`, or
// malformed(what) with an error of ReadField, or if a field extends past `end`.
template <class Malformed, class Take>
Status ForEachField(SliceReader& reader, int64_t end, const Malformed& malformed,
                    const Take& take) {
  while (reader.position() < end) {
    const SliceReader begin = reader;
    Field field;
    const Status read = ReadField(reader, field);
    if (!read.ok()) return malformed(read.message());
    const int64_t after = reader.position() + field.bytes;
    if (after > end) return malformed("a field extends past byte " + std::to_string(end));
    ATTEND_RETURN_IF_ERROR(take(field, begin));
    reader.Skip(after - reader.position());
  }
  return Status();
}

}  // namespace attend::wire
