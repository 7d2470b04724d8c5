// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of a chunked request's tensors belong, and which have come. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/util/status.h"
#include "server/rpc/intake.h"
#include "server/util/byte_ranges.h"
#include "server/wire/chunk_codec.h"

namespace attend {

class UploadPlaces {
 public:
  UploadPlaces() = default;
  explicit UploadPlaces(const TensorPlaces& places);

  int64_t total_bytes() const { return total_bytes_; }

  // The chunk's place, from now on taken. INVALID_ARGUMENT: it is none, or taken; or the bytes that
  // came lie in too many pieces, which are memory outside the budget.
  Result<char*> Reserve(const ChunkMessage& chunk);
  // What has not come, in words: "3 of q's 64 bytes, ...".
  std::string MissingText() const;

 private:
  TensorPlaces places_;
  std::array<ByteRanges, kTensorsMax> ranges_;
  int64_t total_bytes_ = 0;
};

}  // namespace attend
