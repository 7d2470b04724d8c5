// SPDX-License-Identifier: Apache-2.0
//
// Splits a ModelInferRequest in place: one walk over its top-level fields and those of each input.
// Tensor bytes, raw and typed, are not moved; everything else is small and is copied to a header
// for the generated parser. Never allocates by a declared length. Pure.

#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/util/status.h"
#include "server/oip/models.h"
#include "server/wire/request_codec.h"
#include "server/wire/slice_reader.h"

namespace attend::oip {

// A byte range of the message.
struct MessagePart {
  int64_t offset = 0;
  int64_t bytes = -1;  // negative: absent
  bool present() const { return bytes >= 0; }
};

struct InferScan {
  int64_t raw_count = 0;
  std::array<MessagePart, kInputCount> raw{};  // the first entries of raw_input_contents
  int64_t inputs = 0;
  std::array<MessagePart, kInputCount> contents{};  // `contents` of each input
};

// Sets `scan.header` to the message without tensor bytes. INVALID_ARGUMENT if this is not a
// ModelInferRequest, its small fields are too large, or it has more inputs than any model.
Status ScanInfer(std::span<const ByteSpan> slices, MessageScan& scan, InferScan& out);

}  // namespace attend::oip
