// SPDX-License-Identifier: Apache-2.0
//
// Walks over the fields of an encoded message without parsing them. Every declared length is
// compared with the bytes present. Pure.

#pragma once

#include <cstdint>

#include "kernels/util/status.h"
#include "server/wire/slice_reader.h"

namespace attend::wire {

struct Field {
  uint64_t number = 0;
  uint32_t type = 0;  // kVarint, kFixed64, kBytes or kFixed32
  int64_t bytes = 0;  // of the value, after the tag and the length
};

// Reads a field up to its value, which is the next field.bytes bytes. INVALID_ARGUMENT says in one
// clause what is wrong: a fault that the generated parser would refuse too, or a group, which our
// messages do not have.
Status ReadField(SliceReader& reader, Field& field);

}  // namespace attend::wire
