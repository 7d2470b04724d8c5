// SPDX-License-Identifier: Apache-2.0
//
// A walk over the fields of an encoded message, without parsing them. Every declared length is
// compared with the bytes that are there. Pure.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"
#include "server/wire/slice_reader.h"

namespace attend::wire {

struct Field {
  uint64_t number = 0;
  uint32_t type = 0;  // kVarint, kFixed64, kBytes or kFixed32
  int64_t bytes = 0;  // of the value, behind the tag and the length
};

// Reads a field up to its value, which has field.bytes bytes from here on. INVALID_ARGUMENT says in
// one clause what is wrong: the fault of a message that the generated parser would not take either,
// or a group, of which our messages have none.
Status ReadField(SliceReader& reader, Field& field);

}  // namespace attend::wire
