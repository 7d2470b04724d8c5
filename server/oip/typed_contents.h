// SPDX-License-Identifier: Apache-2.0
//
// The bytes of inputs as Protobuf's repeated numbers, or as raw ones to be made such. Pure.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/oip/infer_scan.h"
#include "server/wire/slice_reader.h"

namespace attend::oip {

// Where the numbers of typed contents of FP32 are, if they are one run, as every common runtime
// writes them.
std::optional<MessagePart> FindRun(std::span<const ByteSpan> slices, const MessagePart& contents);

// The same; those in several runs, which FindParts has counted, are appended to `tail`, which
// follows the message.
Status FindFloats(std::span<const ByteSpan> slices, const MessagePart& contents,
                  const std::string& what, int64_t message_bytes, std::vector<uint8_t>& tail,
                  MessagePart& found);

// Typed contents of integers, whose field has the number `field`: appends their varints to `out`
// and counts them.
Status TakeVarints(std::span<const ByteSpan> slices, const MessagePart& contents, int field,
                   const std::string& what, std::vector<uint8_t>& out, int64_t& entries);

// Integers of `width` bytes, 4 or 8, little-endian, which `reader` is at: appends them to `out` as
// varints. INVALID_ARGUMENT if one is negative, which none of a request may be.
Status EncodeVarints(SliceReader& reader, int64_t bytes, int width, const std::string& what,
                     std::vector<uint8_t>& out);

}  // namespace attend::oip
