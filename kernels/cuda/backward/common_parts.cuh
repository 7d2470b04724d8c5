// SPDX-License-Identifier: Apache-2.0
//
// Which rows of a tile are measured (measure.cuh), and how much of them. Some by their LSE
// (IsMeasured). Of others delta alone, where O's rounding spoils gradients more than rounding dS
// does: dQ gets delta's error times the row's mean key, so that matters where keys have much in
// common, and values too, as else O is small beside what dS is made of. RowTerms doubts rows by O
// alone; what keys and values have in common is asked here, of some of them. Device code; all
// threads of a block call each function together.

#pragma once

#include <cfloat>

#include "kernels/contract/limits.h"
#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// The square of a tensor's mean row, and what rows are off it, squared, on average.
struct Moments {
  float common = 0.0f, spread = 0.0f;

  __device__ __forceinline__ float Size() const { return common + spread; }
  // How much of a row's length is the mean's.
  __device__ __forceinline__ float Share() const {
    return common > 0.0f ? sqrtf(common / Size()) : 0.0f;
  }
};

// Rows of one head of a tensor.
struct HeadRows {
  const void* data;
  int64_t first, stride, count, dim;  // elements, and rows of dim columns
};

inline constexpr int kMomentTensors = 3;  // at a time

// The moments of up to kSamples rows of each, as far apart as they can be.
template <int kThreads>
struct MomentScratch {
  static constexpr int kSamples = 64;
  static constexpr int kRowsAtOnce = kThreads / 64;  // 64 threads take a row
  static_assert(kThreads % 64 == 0 && kThreads / 32 >= kMomentTensors);
  float sums[kMomentTensors][kRowsAtOnce][kHeadDimMax];
  float squares[kMomentTensors][kThreads / 32];
  Moments found[kMomentTensors];

  // Threads from kThreads on do nothing.
  __device__ __forceinline__ void Add(int which, const HeadRows& rows, DType dtype) {
    if (threadIdx.x >= kThreads) return;
    const int column = static_cast<int>(threadIdx.x) % 64;
    const int64_t samples = min(rows.count, int64_t{kSamples});
    float own[kHeadDimMax / 64] = {};
    float square = 0.0f;
#pragma unroll 4
    for (int64_t n = threadIdx.x / 64; n < samples; n += kRowsAtOnce) {
      const int64_t row = rows.first + n * rows.count / samples * rows.stride;
#pragma unroll
      for (int c = 0; c < kHeadDimMax / 64; ++c) {
        if (column + 64 * c >= rows.dim) break;
        const float x = LoadGlobal(rows.data, dtype, row + column + 64 * c);
        own[c] += x;
        square = fmaf(x, x, square);
      }
    }
#pragma unroll
    for (int c = 0; c < kHeadDimMax / 64; ++c) {
      sums[which][threadIdx.x / 64][column + 64 * c] = own[c];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      square += __shfl_xor_sync(0xffffffffu, square, distance);
    }
    if (threadIdx.x % 32 == 0) squares[which][threadIdx.x / 32] = square;
  }

  // After all were added and threads have met: one warp for each tensor. A sample's mean is off by
  // some of the spread, which is taken off its square.
  __device__ __forceinline__ void Finish(int64_t count) {
    const int which = static_cast<int>(threadIdx.x) / 32;
    if (which >= kMomentTensors) return;
    const float samples = fmaxf(static_cast<float>(min(count, int64_t{kSamples})), 1.0f);
    float common = 0.0f;
    for (int column = static_cast<int>(threadIdx.x) % 32; column < kHeadDimMax; column += 32) {
      float sum = 0.0f;
      for (int n = 0; n < kRowsAtOnce; ++n) sum += sums[which][n][column];
      common = fmaf(sum / samples, sum / samples, common);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      common += __shfl_xor_sync(0xffffffffu, common, distance);
    }
    if (threadIdx.x % 32 != 0) return;
    float size = 0.0f;
    for (int n = 0; n < kThreads / 32; ++n) size += squares[which][n];
    const float spread =
        fmaxf(size / samples - common, 0.0f) * samples / fmaxf(samples - 1.0f, 1.0f);
    found[which] = {fmaxf(common - spread / samples, 0.0f), spread};
  }
};

// A tile of query rows of one head, and the keys that some of them see.
struct MeasuredTile {
  int64_t b, h;
  Sequence s;
  int64_t row, row_end;
  int64_t key, key_end;
};

// What a tile's keys, values and queries have in common, as far as it says how much delta's error
// spoils. All 0: nothing.
struct CommonParts {
  float keys = 0.0f;      // how much of a key's length a row's mean key has
  float queries = 0.0f;   // the same of queries
  float values = 0.0f;    // the square of a value's spread beside its mean
  bool constant = false;  // values are nearly the same
  float unit = 0.0f;      // the dtype's roundoff

  template <int kThreads>
  static __device__ __forceinline__ CommonParts Of(const BackwardPass& pass,
                                                   const MeasuredTile& tile,
                                                   MomentScratch<kThreads>& scratch) {
    const Attention& a = pass.attention;
    const Problem& p = a.problem;
    const int64_t kv_head = tile.h / p.group();
    const int64_t keys = tile.key_end - tile.key;
    const int64_t rows = tile.row_end - tile.row;
    const auto head = [&](const ConstTensorView& x, int64_t h, int64_t row, int64_t count,
                          int64_t dim) {
      return HeadRows{x.data, tile.b * x.stride_b + h * x.stride_h + row * x.stride_l, x.stride_l,
                      count, dim};
    };
    scratch.Add(0, head(a.k, kv_head, tile.s.k_row + tile.key, keys, p.dim), p.dtype);
    scratch.Add(1, head(a.v, kv_head, tile.s.k_row + tile.key, keys, p.dim_v), p.dtype);
    scratch.Add(2, head(a.q, tile.h, tile.s.q_row + tile.row, rows, p.dim), p.dtype);
    __syncthreads();
    scratch.Finish(threadIdx.x / 32 == 2 ? rows : keys);
    __syncthreads();
    const Moments k = scratch.found[0], v = scratch.found[1], q = scratch.found[2];
    // Weights lean to keys like the query, which moves the mean key by as much as scores spread.
    const float lean =
        fminf(fabsf(p.scale) * sqrtf(q.Size() * k.Size()) / static_cast<float>(p.dim), 1.0f);
    CommonParts parts;
    parts.keys = sqrtf(k.Share() * k.Share() + lean * lean);
    parts.queries = q.Share();
    parts.values = v.spread / fmaxf(v.common, FLT_MIN);
    parts.constant = v.common > 4.0f * v.spread;
    parts.unit = p.dtype == DType::kFloat16 ? 0x1p-12f : 0x1p-9f;
    return parts;
  }

  // Whether delta's error spoils the gradients of a row of such a doubt that sees `count` keys.
  // Weights are spread over that many at most. Rows whose O is the same but for its rounding share
  // their errors, which then add up in dK as queries do.
  __device__ __forceinline__ bool Spoil(float doubt, int64_t count) const {
    if (!(doubt > 0.0f)) return false;
    const float most = 1.0f / (1.0f / doubt + values / static_cast<float>(count));
    const bool alike = doubt * unit * unit > 0.25f;
    const float share = keys + (alike ? queries : 0.0f);
    return constant || most * share * share > kDoubted;
  }
};

// How much of a row is measured.
enum class Measured { kNothing, kDelta, kAll };

// Which of a tile's rows. In shared memory: kernels have no registers to spare for it.
struct RowChoice {
  MeasuredTile tile;
  CommonParts parts;

  __device__ __forceinline__ Measured Of(const BackwardPass& pass, int64_t i) const {
    const Attention& a = pass.attention;
    const Problem& p = a.problem;
    const int64_t at = tile.b * a.lse_stride_b + tile.h * a.lse_stride_h + tile.s.q_row + i;
    if (IsMeasured(p, a.lse[at])) return Measured::kAll;
    const float doubt = DoubtOf(pass, i);
    if (doubt == 0.0f) return Measured::kNothing;
    const KeyRange keys = VisibleKeys(p.mask, tile.s, i);
    return parts.Spoil(doubt, keys.end - keys.begin) ? Measured::kDelta : Measured::kNothing;
  }
  // Finds out, for the tile, and says whether there are any. `scratch`: other shared memory that
  // nothing else uses until threads meet again.
  template <int kThreads>
  __device__ __forceinline__ bool Any(const BackwardPass& pass, MomentScratch<kThreads>& scratch) {
    bool doubted = false;
    for (int64_t i = tile.row + threadIdx.x; i < tile.row_end; i += blockDim.x) {
      doubted = doubted || DoubtOf(pass, i) != 0.0f;
    }
    CommonParts found;
    if (__syncthreads_or(doubted)) found = CommonParts::Of(pass, tile, scratch);
    if (threadIdx.x == 0) parts = found;
    __syncthreads();
    bool any = false;
    for (int64_t i = tile.row + threadIdx.x; i < tile.row_end; i += blockDim.x) {
      any = any || Of(pass, i) != Measured::kNothing;
    }
    return __syncthreads_or(any) != 0;
  }

 private:
  __device__ __forceinline__ float DoubtOf(const BackwardPass& pass, int64_t i) const {
    if (pass.doubt == nullptr) return 0.0f;
    return pass.doubt[TermIndex(pass.attention.problem, tile.s, tile.b, tile.h, i)];
  }
};

}  // namespace attend::cuda
