// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, softmax: what a thread of a consumer knows of its two rows between tiles, and
// how scores become weights. Device code; the lanes of a warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"
#include "kernels/cuda/ptx/tanh.cuh"

namespace attend::cuda {

// A thread's two rows, 8 apart; four lanes, a quad, share them. kScores of the thread's scores
// belong to a tile: [4 * j + 2 * r + i] is row r's key 8 * j + 2 * (lane % 4) + i.
//
// A weight is 2^(score * to_log2 - base). The base follows a row's maximum only when that has risen
// by more than kBaseSlack: weights then reach 2^kBaseSlack, which costs no precision, and sums and
// output seldom need to be rescaled. So for most tiles the maximum need not be known, only that no
// score has risen that far: one vote and no shuffles. And that is cheap to see: floats that are not
// negative order as their bits do as integers, of which the hardware takes the largest of three in
// one instruction; that of a row's scores and 0 is enough unless its base is far below 0.
// kOverflows: scores below -2^23 have become -inf (bias.cuh). So that they would have no weight, a
// row whose base is not far above those is computed again; so is one with a score of +inf.
template <int kScores, bool kOverflows = false>
struct SoftmaxRows {
  float to_log2;
  float base[2];  // rounded once, so that all weights of a row and the next rescale share it
  float sum[2];   // of this thread's columns

  __device__ __forceinline__ void Reset(float new_to_log2) {
    to_log2 = new_to_log2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = kNoBase;
      sum[r] = 0.0f;
    }
  }

  // Whether one of the warp's rows may have a score that lifts its base from there. Infinity does,
  // and NaN but for one with a sign: that makes its weight and the row's sum NaN all the same.
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

  // The rows' maxima, and what follows from them. What sums were multiplied by, and output is still
  // to be, goes to `rescale`.
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

  // Lifts the bases if need be. True: it may have, see `rescale`. (Asking once more whether it did
  // lets the compiler move exponentials over the turn's barrier, which costs more than it saves.)
  __device__ __forceinline__ bool Follow(const float (&scores)[kScores], float (&rescale)[2]) {
    if (!MayRise(scores, base)) return false;
    FollowMaxima(scores, rescale);
    return true;
  }

  // Whether one of the warp's rows has seen no key.
  __device__ __forceinline__ bool AnyWithoutBase() const {
    return __any_sync(0xffffffffu, base[0] == kNoBase || base[1] == kNoBase);
  }

  // Scores become weights, by these bases.
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

// Multiplies a thread's part of two rows of the output.
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

// Softcap, in units of the cap.
template <int kScores>
__device__ __forceinline__ void CapScores(float factor, float (&scores)[kScores]) {
#pragma unroll
  for (float& s : scores) s = AccurateTanh(s * factor);
}

// Gives -inf to the keys of row `r` of which hidden(key) is true, counted from the thread's first.
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

// Gives -inf to the keys of a tile, whose first of the thread's is `first`, that `row` and the row
// 8 further do not see. `at_begin`: some row's window may begin in the tile.
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

// Makes the weights of a tile, whose keys begin at `key`, 0 that dropout removes. Rows of the part
// begin at a multiple of 16 of the whole's.
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
