// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, general kernels: ALiBi at one instruction per score. Device code; the lanes of a
// warp call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/tanh.cuh"
#include "kernels/cuda/sm90/softmax.cuh"
#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

// Adds ALiBi to a tile's scores, without the part common to all scores of a row, which is returned
// in `added`. The tile's first key is at `distance` from the diagonal of the thread's first row.
// Usually all keys of a warp are on one side of its rows' diagonals. Then `added` is the term of
// the thread's key nearest to them, so that scores of near keys are not rounded at the distance of
// far ones.
template <int kScores>
__device__ __forceinline__ void AddAlibi(float slope, int distance, float (&scores)[kScores],
                                         float (&added)[2]) {
  constexpr int kLast = 2 * kScores - 7;  // the thread's last key, counted from its first
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int of_first_row = distance + lane / 4;
  distance += 2 * (lane % 4);
  if (of_first_row + 2 * kScores <= 1) {
    added[0] = slope * static_cast<float>(distance + kLast);
    added[1] = slope * static_cast<float>(distance + kLast - 8);
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      scores[n] = fmaf(slope, static_cast<float>(n / 4 * 8 + n % 2 - kLast), scores[n]);
    }
    return;
  }
  if (of_first_row >= 15) {
    added[0] = -slope * static_cast<float>(distance);
    added[1] = -slope * static_cast<float>(distance - 8);
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      scores[n] = fmaf(-slope, static_cast<float>(n / 4 * 8 + n % 2), scores[n]);
    }
    return;
  }
  added[0] = added[1] = 0.0f;
#pragma unroll
  for (int n = 0; n < kScores; ++n) {
    const int away = distance - n / 2 % 2 * 8 + n / 4 * 8 + n % 2;
    scores[n] = fmaf(-slope, static_cast<float>(abs(away)), scores[n]);
  }
}

// The current tile, as seen by one consumer thread.
template <class T, bool = T::kGeneral>
struct GeneralTile {};
template <class T>
struct GeneralTile<T, true> {
  static constexpr int kScores = T::kKeys / 2;  // per thread, laid out as in SoftmaxRows

  // ALiBi's slope for raw products; 0 without ALiBi. NaN if its scores might be too large for the
  // rows' bases: then the rows are recomputed (redo_rows.cuh).
  float slope;
  float base[2];  // SoftmaxRows::base, minus `added`

  // Call before the tile's first product, which hides the load's latency.
  __device__ __forceinline__ void LoadSlope(const Sm90Work& work) {
    const Attention& a = *work.attention;
    slope = 0.0f;
    if (a.problem.has_alibi) slope = a.alibi_slopes[work.o_batch * a.alibi_stride_b + work.o_head];
  }
  // Call after it.
  __device__ __forceinline__ void ScaleSlope(const Sm90Work& work) {
    if (slope == 0.0f) return;
    const Problem& p = work.attention->problem;
    const Window& window = work.window;
    const float farthest = static_cast<float>(window.k_len) + static_cast<float>(work.q_len) +
                           fabsf(static_cast<float>(window.offset));
    const bool near = fabsf(slope) * farthest * kLog2E <= kNearBaseMax;
    slope = near ? slope / ScoreUnit(p) : __int_as_float(0x7fffffff);
  }

  __device__ __forceinline__ void SetBases(const float (&added)[2],
                                           const SoftmaxRows<kScores>& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = fmaf(-added[r], rows.to_log2, rows.base[r]);
  }

  // SoftmaxRows::FollowMaxima for scores without `added`, which differs between a row's four lanes.
  // Rows rise only if the warp's vote would have found it too.
  __device__ __forceinline__ void FollowMaxima(const float (&added)[2], SoftmaxRows<kScores>& rows,
                                               const float (&scores)[kScores],
                                               float (&rescale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = MaxOrNan(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < kScores / 4; ++j) {
        top = MaxOrNan(top, MaxOrNan(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      int rises = RaisesSm90(top, base[r], rows.to_log2);
      top += added[r];
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        top = MaxOrNan(top, __shfl_xor_sync(0xffffffffu, top, step));
        rises |= __shfl_xor_sync(0xffffffffu, rises, step);
      }
      rescale[r] = 1.0f;
      if (rises == 0) continue;
      const float risen = NearOrMarkedBase(top, rows.to_log2);
      rescale[r] = FastExp2(rows.base[r] - risen);
      rows.sum[r] *= rescale[r];
      rows.base[r] = risen;
    }
  }

  // Score terms and mask, and their effect on the rows' bases. Returns as SoftmaxRows::Follow.
  // `mask` sets the scores of hidden keys to -inf. `cap`: CapFactor.
  template <class Mask>
  __device__ __forceinline__ bool Finish(float cap, int distance, const Mask& mask,
                                         SoftmaxRows<kScores>& rows, float (&scores)[kScores],
                                         float (&rescale)[2]) {
    if (cap != 0.0f) CapProducts(cap, scores);
    float added[2] = {0.0f, 0.0f};
    if (fabsf(slope) > 0.0f) AddAlibi(slope, distance, scores, added);
    mask();
    SetBases(added, rows);
    if (!rows.MayRise(scores, base)) return false;
    FollowMaxima(added, rows, scores, rescale);
    SetBases(added, rows);
    return true;
  }
};

// The bases that the tile's weights are relative to.
template <class T, class Rows>
__device__ __forceinline__ const float (&TileBases(const GeneralTile<T, false>&,
                                                   const Rows& rows))[2] {
  return rows.base;
}
template <class T, class Rows>
__device__ __forceinline__ const float (&TileBases(const GeneralTile<T, true>& tile,
                                                   const Rows&))[2] {
  return tile.base;
}

// Whether the tile's rows are recomputed whatever their scores.
template <class T>
__device__ __forceinline__ bool IsMarked(const GeneralTile<T, false>&) {
  return false;
}
template <class T>
__device__ __forceinline__ bool IsMarked(const GeneralTile<T, true>& tile) {
  return tile.slope != tile.slope;
}

}  // namespace attend::cuda
