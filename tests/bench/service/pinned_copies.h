// SPDX-License-Identifier: Apache-2.0
//
// What the bus to a GPU carries without any server: copies of page-locked memory there and back at
// once. For one thread.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tests/bench/service/rounds.h"

namespace attend::bench {

class PinnedCopies {
 public:
  // "cuda:N". UNIMPLEMENTED in a build without CUDA. `out_bytes` is at most `in_bytes`.
  static Result<std::unique_ptr<PinnedCopies>> Make(const std::string& device, int64_t in_bytes,
                                                    int64_t out_bytes);
  virtual ~PinnedCopies() = default;
  // For `seconds`, one pair of copies at least. INTERNAL if other bytes come back.
  virtual Result<Sample> Drive(double seconds) = 0;
};

}  // namespace attend::bench
