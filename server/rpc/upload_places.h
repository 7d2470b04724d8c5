// SPDX-License-Identifier: Apache-2.0
//
// The destinations of a chunked request's bytes, and which have arrived. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/util/status.h"
#include "server/rpc/request_reader.h"
#include "server/util/byte_ranges.h"
#include "server/wire/chunk_codec.h"

namespace attend {

class UploadPlaces {
 public:
  UploadPlaces() = default;
  explicit UploadPlaces(const TensorPlaces& places);

  int64_t total_bytes() const { return total_bytes_; }

  // Reserves the chunk's place. INVALID_ARGUMENT: no such place, or it is already taken; or the
  // bytes are in too many separate ranges, whose list is memory outside the budget.
  Result<char*> Reserve(const ChunkMessage& chunk);
  // Describes the missing bytes: "3 of q's 64 bytes, ...".
  std::string MissingText() const;

 private:
  TensorPlaces places_;
  std::array<ByteRanges, kTensorsMax> ranges_;
  int64_t total_bytes_ = 0;
};

}  // namespace attend
