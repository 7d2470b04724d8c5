// SPDX-License-Identifier: Apache-2.0
//
// The bandwidth of the bus to a GPU without a server: concurrent copies of page-locked memory in
// both directions. For one thread.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tests/bench/service/rounds.h"

namespace attend::bench {

class PinnedCopies {
 public:
  // `device` is "cuda:N". UNIMPLEMENTED in a build without CUDA. `out_bytes` is at most `in_bytes`.
  static Result<std::unique_ptr<PinnedCopies>> Make(const std::string& device, int64_t in_bytes,
                                                    int64_t out_bytes);
  virtual ~PinnedCopies() = default;
  // Copies for `seconds`, at least one pair of copies. INTERNAL if the bytes differ.
  virtual Result<Sample> Drive(double seconds) = 0;
};

}  // namespace attend::bench
