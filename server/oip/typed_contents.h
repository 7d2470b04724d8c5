// SPDX-License-Identifier: Apache-2.0
//
// Converts inputs to the bytes of Protobuf's repeated numbers. Pure.

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

// The numbers of typed FP32 contents if they are one packed run, which is how every common runtime
// encodes them.
std::optional<MessagePart> FindRun(std::span<const ByteSpan> slices, const MessagePart& contents);

// Like FindRun. Numbers in several runs, whose size FindParts has bounded, are appended to `tail`,
// which follows the message.
Status FindFloats(std::span<const ByteSpan> slices, const MessagePart& contents,
                  const std::string& what, int64_t message_bytes, std::vector<uint8_t>& tail,
                  MessagePart& found);

// For typed integer contents in field number `field`: appends their varints to `out` and counts
// them.
Status TakeVarints(std::span<const ByteSpan> slices, const MessagePart& contents, int field,
                   const std::string& what, std::vector<uint8_t>& out, int64_t& entries);

// Reads integers of `width` bytes (4 or 8, little-endian) at the reader's position and appends them
// to `out` as varints. INVALID_ARGUMENT if one is negative, which no field of a request allows.
Status EncodeVarints(SliceReader& reader, int64_t bytes, int width, const std::string& what,
                     std::vector<uint8_t>& out);

}  // namespace attend::oip
