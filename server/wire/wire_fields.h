// SPDX-License-Identifier: Apache-2.0
//
// Iterates over the fields of an encoded message without parsing them. Every declared length is
// compared with the bytes present. Pure.

#pragma once

#include <cstdint>

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

}  // namespace attend::wire
