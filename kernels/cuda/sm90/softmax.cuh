// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, softmax: the state of a consumer thread's two rows between tiles, and how scores
// become weights. Device code; the lanes of a warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"

namespace attend::cuda {

// A thread's two rows, 8 apart; four lanes, a quad, share them. A tile has kScores of the thread's
// scores: [4 * j + 2 * r + i] is row r's key 8 * j + 2 * (lane % 4) + i.
//
// A weight is 2^(score * to_log2 - base). The base follows a row's maximum only when that has risen
// by more than kBaseSlack: weights then reach 2^kBaseSlack, which costs no precision, and sums and
// output are seldom rescaled. So for most tiles the maximum itself is not needed, only that no
// score has risen that far: one vote and no shuffles. The test is cheap: non-negative floats order
// like integers, of which the hardware takes the maximum of three in one instruction; the maximum
// of a row's scores and 0 is enough unless its base is far below 0.
//
// kOverflows: scores below -2^23 have become -inf (bias.cuh). For these to have no weight a row's
// base must be far above them; otherwise the row is recomputed, as is one with a score of +inf.
template <int kScores, bool kOverflows = false>
struct SoftmaxRows {
  float to_log2;
  float base[2];  // rounded once, so that all weights of a row and the next rescale share it
  float sum[2];   // over this thread's columns

  __device__ __forceinline__ void Reset(float new_to_log2) {
    to_log2 = new_to_log2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = kNoBase;
      sum[r] = 0.0f;
    }
  }

  // Whether a score of one of the warp's rows may raise its base from `from`. +Inf does, and NaN
  // unless its sign bit is set: that NaN makes its weight and the row's sum NaN anyway.
  __device__ __forceinline__ bool MayRise(const float (&scores)[kScores],
                                          const float (&from)[2]) const {
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int top[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float* pair = scores + 4 * j + 2 * r;
        top[j % 2] = __vimax3_s32(top[j % 2], __float_as_int(pair[0]), __float_as_int(pair[1]));
      }
      const float highest = __int_as_float(::max(top[0], top[1]));
      rises |= MayRaiseSm90(highest, from[r], to_log2);
    }
    return __any_sync(0xffffffffu, rises);
  }

  // Computes the rows' maxima and raises bases. Rescales the sums; the output is still to be
  // multiplied by `rescale`.
  __device__ __forceinline__ void FollowMaxima(const float (&scores)[kScores],
                                               float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = MaxOrNan(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < kScores / 4; ++j) {
        top = MaxOrNan(top, MaxOrNan(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      top = MaxOrNan(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = MaxOrNan(top, __shfl_xor_sync(0xffffffffu, top, 2));
      rescale[r] = 1.0f;
      if (!RaisesSm90(top, base[r], to_log2)) continue;
      const bool marks = kOverflows && fabsf(RoundedProduct(top, to_log2)) > 0x1p22f;
      const float risen = marks ? kMarkedBase : NearOrMarkedBase(top, to_log2);
      rescale[r] = FastExp2(base[r] - risen);
      sum[r] *= rescale[r];
      base[r] = risen;
    }
  }

  // Raises the bases if necessary. True: it may have, see `rescale`. (A second test of whether it
  // did would let the compiler move exponentials across the turn's barrier, which costs more than
  // it saves.)
  __device__ __forceinline__ bool Follow(const float (&scores)[kScores], float (&rescale)[2]) {
    if (!MayRise(scores, base)) return false;
    FollowMaxima(scores, rescale);
    return true;
  }

  // Whether one of the warp's rows has seen no key.
  __device__ __forceinline__ bool AnyWithoutBase() const {
    return __any_sync(0xffffffffu, base[0] == kNoBase || base[1] == kNoBase);
  }

  // Turns scores into weights relative to these bases.
  __device__ __forceinline__ void Exponentiate(const float (&by)[2], float (&scores)[kScores]) {
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = scores[4 * j + i];
        s = FastExp2(fmaf(s, to_log2, -by[i / 2]));
        total[i / 2] += s;
      }
    }
    sum[0] += total[0];
    sum[1] += total[1];
  }
};

// Rescales a thread's part of two output rows.
template <int kOutputs>
__device__ __forceinline__ void RescaleRows(const float (&rescale)[2], float (&output)[kOutputs]) {
#pragma unroll
  for (int j = 0; j < kOutputs / 4; ++j) {
    output[4 * j] *= rescale[0];
    output[4 * j + 1] *= rescale[0];
    output[4 * j + 2] *= rescale[1];
    output[4 * j + 3] *= rescale[1];
  }
}

// Sets to -inf the scores of row `r` whose key, counted from the thread's first, is hidden(key).
template <int kScores, class Hidden>
__device__ __forceinline__ void HideScores(float (&scores)[kScores], int r, const Hidden& hidden) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (hidden(8 * j + i)) scores[4 * j + 2 * r + i] = NegativeInfinity();
    }
  }
}

// Masks a tile whose first key for this thread is `first`, for rows `row` and row + 8. `at_begin`:
// some row's window may begin in the tile.
template <int kScores, class Window>
__device__ __forceinline__ void MaskScores(const Window& window, int row, int first, bool at_begin,
                                           float (&scores)[kScores]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = window.End(row + 8 * r) - first;
    HideScores(scores, r, [end](int key) { return key >= end; });
    if (!at_begin) continue;
    const int begin = window.Begin(row + 8 * r) - first;
    HideScores(scores, r, [begin](int key) { return key < begin; });
  }
}

// Zeroes the weights of a tile, whose keys begin at `key`, that dropout removes. The part's rows
// must begin at a multiple of 16 of the whole's.
template <int kScores>
__device__ __forceinline__ void DropWeights(const DropoutLane& dropout, int key,
                                            float (&weights)[kScores]) {
#pragma unroll
  for (int g = 0; g < kScores / 8; ++g) {
    const DropoutBits bits = dropout.Draw<true>(0, key + 16 * g);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float* const pair = weights + 8 * g + n % 2 * 4 + n / 2 * 2;
      if (bits.words[n] << 16 < dropout.least) pair[0] = 0.0f;
      if (bits.words[n] < dropout.least) pair[1] = 0.0f;
    }
  }
}

}  // namespace attend::cuda
