// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of a chunked request's tensors belong, and which have arrived. Not thread-safe.

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

  // Reserves the chunk's place. INVALID_ARGUMENT: there is no such place, or it is taken; or the
  // arrived bytes are in too many separate pieces, whose list is memory outside the budget.
  Result<char*> Reserve(const ChunkMessage& chunk);
  // The missing bytes, in words: "3 of q's 64 bytes, ...".
  std::string MissingText() const;

 private:
  TensorPlaces places_;
  std::array<ByteRanges, kTensorsMax> ranges_;
  int64_t total_bytes_ = 0;
};

}  // namespace attend
