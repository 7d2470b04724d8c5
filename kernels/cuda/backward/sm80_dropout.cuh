// SPDX-License-Identifier: Apache-2.0
//
// Dropout in the backward pass by mma.sync. Device code; all lanes of a warp call each function
// together.

#pragma once

#include <cstdint>

#include "kernels/cuda/backward/sm80_tile.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"

namespace attend::cuda::backward {

// Draws of a thread's pairs in a 16 x 16 block: word 2 * half + eight has those of its owned row's
// half `half` (see OwnRow) and of its two others among the first or last eight.
struct PairDraws {
  uint32_t words[4];
};

// With query rows down, a thread has one Philox group of 16 x 16.
template <class T>
__device__ __forceinline__ PairDraws DrawRowsDown(const Attention& a, const MmaWork& work, int head,
                                                  int slice, int key) {
  const DropoutLane lane =
      DropoutLane::Of(a, work.b, head, OwnRow<T>(work, slice, 0), ThreadIndex() % 32);
  const DropoutBits bits = lane.Draw<false>(0, key);
  return {{bits.words[0], bits.words[1], bits.words[2], bits.words[3]}};
}

// With keys down it has one key's half of two groups: lanes of adjacent keys draw one each, and
// exchange halves.
template <class T>
__device__ __forceinline__ PairDraws DrawKeysDown(const Attention& a, const MmaWork& work, int head,
                                                  int slice, int row) {
  const int thread = ThreadIndex() % 32;
  const int odd = thread / 4 % 2;  // the lane's key, and the row of the two that it draws for
  const DropoutLane lane = DropoutLane::Of(a, work.b, head, row + thread % 4 * 2 + odd, thread / 8);
  const int key = OwnRow<T>(work, slice, 0) - thread / 4;
  const DropoutBits bits = lane.Draw<false>(0, key);
  const uint32_t mine = odd ? 0x7632 : 0x5410;
  const uint32_t theirs = odd ? 0x5410 : 0x7632;
  PairDraws draws;
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    const uint32_t first = bits.words[2 * eight];
    const uint32_t second = bits.words[2 * eight + 1];
    const uint32_t own = __byte_perm(first, second, mine);
    const uint32_t got = __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, theirs), 4);
    // Halves are the thread's two keys; the result's words have its two rows.
    const uint32_t even_row = odd ? got : own;
    const uint32_t odd_row = odd ? own : got;
    draws.words[eight] = __byte_perm(even_row, odd_row, 0x5410);
    draws.words[2 + eight] = __byte_perm(even_row, odd_row, 0x7632);
  }
  return draws;
}

// Which of the thread's pairs of a step are kept: bit 4 * (slice * T::kStepBlocks + eight others) +
// fragment element. `other`: the thread's first.
template <class T>
__device__ __forceinline__ uint32_t KeptPairs(const Attention& a, const MmaWork& work, int head,
                                              int other) {
  static_assert(T::kSlices * T::kStepBlocks * 4 <= 32);
  const uint32_t least = static_cast<uint32_t>(kDropoutOne - a.problem.dropout) * 0x10001u;
  const int first = other - ThreadIndex() % 4 * 2;
  uint32_t kept = 0;
#pragma unroll 1
  for (int n = 0; n < T::kSlices * T::kStepBlocks / 2; ++n) {
    const int slice = n / (T::kStepBlocks / 2);
    const int at = first + n % (T::kStepBlocks / 2) * 16;
    const PairDraws draws = T::kOwnsKeys ? DrawKeysDown<T>(a, work, head, slice, at)
                                         : DrawRowsDown<T>(a, work, head, slice, at);
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // half w / 2, others 8 * (w % 2)
      const uint32_t halves = KeptHalves(draws.words[w], least);
      bits |= ((halves & 1u) | (halves >> 16 & 1u) << 1) << (w % 2 * 4 + w / 2 * 2);
    }
    kept |= bits << (8 * n);
  }
  return kept;
}

// Multiplies kept pairs by `factor` and zeroes the others.
template <class T>
__device__ __forceinline__ void DropPairs(uint32_t kept, float factor, StepSums<T>& sums) {
#pragma unroll
  for (int n = 0; n < T::kSlices * T::kStepBlocks * 4; ++n) {
    float& x = sums[n / 4 / T::kStepBlocks][n / 4 % T::kStepBlocks][n % 4];
    x = kept >> n & 1 ? x * factor : 0.0f;
  }
}

}  // namespace attend::cuda::backward
