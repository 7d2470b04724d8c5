// SPDX-License-Identifier: Apache-2.0
//
// Visibility queries of the backward pass's Tensor Core kernels: keys of a row, rows of a key.
// Device code.

#pragma once

#include "kernels/contract/problem.h"

namespace attend::cuda::backward {

// The keys that a row sees and the rows that see a key, in 32 bits: lengths are at most 2^30. A
// bound of -1 is unbounded.
struct Band {
  int left, right;
  int q_len, k_len;
  int offset;  // of the diagonal

  Band() = default;
  __device__ __forceinline__ Band(const Problem& p, const Sequence& s)
      : left(Bound(p.mask.left)),
        right(Bound(p.mask.right)),
        q_len(static_cast<int>(s.q_len)),
        k_len(static_cast<int>(s.k_len)),
        offset(static_cast<int>(s.offset)) {}

  __device__ __forceinline__ int KeyBegin(int row) const {
    return left >= 0 ? max(row + offset - left, 0) : 0;
  }
  __device__ __forceinline__ int KeyEnd(int row) const {
    return right >= 0 ? min(row + offset + right + 1, k_len) : k_len;
  }
  __device__ __forceinline__ int RowBegin(int key) const {
    return right >= 0 ? max(key - offset - right, 0) : 0;
  }
  __device__ __forceinline__ int RowEnd(int key) const {
    return left >= 0 ? min(key - offset + left + 1, q_len) : q_len;
  }

  // A bound that does not fit hides nothing.
  static __device__ __forceinline__ int Bound(int64_t distance) {
    return distance >= (1 << 30) ? -1 : static_cast<int>(distance);
  }
};

}  // namespace attend::cuda::backward
