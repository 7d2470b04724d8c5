// SPDX-License-Identifier: Apache-2.0
//
// pinned_copies.h in a build without CUDA.

#include "tests/bench/service/pinned_copies.h"

namespace attend::bench {

Result<std::unique_ptr<PinnedCopies>> PinnedCopies::Make(const std::string&, int64_t, int64_t) {
  return Unimplemented("this build has no CUDA");
}

}  // namespace attend::bench
