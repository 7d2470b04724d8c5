// SPDX-License-Identifier: Apache-2.0
//
// How much a head's keys, values and queries have in common, which says where O's rounding spoils
// gradients: dQ gets delta's error times the row's mean key, so it matters where keys have much in
// common, and values too, as O is small otherwise beside what dS is made of. Device code.

#pragma once

#include <cfloat>

#include "kernels/contract/limits.h"
#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// From this ratio of the two effects on, squared, delta is measured instead.
inline constexpr float kSpoilt = 2.25f;

// A head of a sequence, as RowTerms asks.
struct alignas(16) CommonParts {
  float keys = 0.0f;     // how much of a key's length a row's mean key has
  float queries = 0.0f;  // the same of queries
  float values = 0.0f;   // the square of a value's spread beside its mean; negative: next to none

  static __device__ __forceinline__ CommonParts* Of(const BackwardPass& pass, int64_t b,
                                                    int64_t h) {
    const Problem& p = pass.attention.problem;
    auto* const first =
        reinterpret_cast<CommonParts*>(pass.doubt + TermsOfHead(p) * p.heads_q + kTermSlack);
    return first + b * p.heads_q + h;
  }

  // Whether delta's error spoils the gradients of a row that sees `count` keys. `error` and `own`:
  // dO times O, and dO times what is the row's own in O, in squares. O's rounding costs delta about
  // the roundoff times the one, and rounding dS costs about that times the other, as far as weights
  // are concentrated; they are spread over all keys at most. Rows whose O is the same but for its
  // rounding share their errors, which then add up in dK as queries do.
  __device__ __forceinline__ bool Spoil(float error, float own, int64_t count, DType dtype) const {
    if (values == 0.0f) return false;
    const float unit = dtype == DType::kFloat16 ? 0x1p-12f : 0x1p-9f;
    const float least = own / error;
    const float share = keys + (least < 4.0f * unit * unit ? queries : 0.0f);
    return values < 0.0f || share * share > kSpoilt * (least + values / static_cast<float>(count));
  }
};
static_assert(sizeof(CommonParts) == kHeadPartBytes);

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
  int64_t first, stride;  // elements
  int64_t count, dim;     // rows of dim columns
};

// The moments of three tensors, from up to kSamples rows of each, as far apart as they can be. In
// shared memory, by kThreads threads: 32 take a row, up to eight columns each.
struct MomentScratch {
  static constexpr int kThreads = 256;
  static constexpr int kSamples = 64;
  static constexpr int kTensors = 3;
  static constexpr int kWarps = kThreads / 32;
  float sums[kTensors][kWarps][kHeadDimMax];
  float squares[kTensors][kWarps];
  Moments found[kTensors];

  __device__ __forceinline__ void Add(int which, const HeadRows& rows, DType dtype) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const auto samples = static_cast<int>(min(rows.count, int64_t{kSamples}));
    const int64_t step = rows.count / max(samples, 1) * rows.stride;
    float square = 0.0f;
    for (int column = lane; column < kHeadDimMax; column += 32) {
      float sum = 0.0f;
      if (column < rows.dim) {
#pragma unroll
        for (int n = 0; n < kSamples / kWarps; ++n) {
          const int row = warp + kWarps * n;
          if (row >= samples) continue;
          const float x = LoadGlobal(rows.data, dtype, rows.first + row * step + column);
          sum += x;
          square = fmaf(x, x, square);
        }
      }
      sums[which][warp][column] = sum;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      square += __shfl_xor_sync(0xffffffffu, square, distance);
    }
    if (lane == 0) squares[which][warp] = square;
  }

  // After all were added and threads have met: a warp for each tensor. A sample's mean is off by
  // some of the spread, which is taken off its square.
  __device__ __forceinline__ void Finish(int64_t count) {
    const int which = static_cast<int>(threadIdx.x) / 32;
    if (which >= kTensors) return;
    const float samples = fmaxf(static_cast<float>(min(count, int64_t{kSamples})), 1.0f);
    float common = 0.0f;
    for (int column = static_cast<int>(threadIdx.x) % 32; column < kHeadDimMax; column += 32) {
      float sum = 0.0f;
      for (int n = 0; n < kWarps; ++n) sum += sums[which][n][column];
      common = fmaf(sum / samples, sum / samples, common);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      common += __shfl_xor_sync(0xffffffffu, common, distance);
    }
    if (threadIdx.x % 32 != 0) return;
    float size = 0.0f;
    for (int n = 0; n < kWarps; ++n) size += squares[which][n];
    const float spread =
        fmaxf(size / samples - common, 0.0f) * samples / fmaxf(samples - 1.0f, 1.0f);
    found[which] = {fmaxf(common - spread / samples, 0.0f), spread};
  }
};

// Finds one head's. All threads of a block.
__device__ __forceinline__ void StoreCommonParts(const BackwardPass& pass, int64_t b, int64_t h,
                                                 MomentScratch& scratch) {
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  const auto rows = [&](const ConstTensorView& x, int64_t head, int64_t row, int64_t count,
                        int64_t dim) {
    return HeadRows{x.data, b * x.stride_b + head * x.stride_h + row * x.stride_l, x.stride_l,
                    count, dim};
  };
  scratch.Add(0, rows(a.k, h / p.group(), s.k_row, s.k_len, p.dim), p.dtype);
  scratch.Add(1, rows(a.v, h / p.group(), s.k_row, s.k_len, p.dim_v), p.dtype);
  scratch.Add(2, rows(a.q, h, s.q_row, s.q_len, p.dim), p.dtype);
  __syncthreads();
  scratch.Finish(threadIdx.x / 32 == 2 ? s.q_len : s.k_len);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const Moments k = scratch.found[0], v = scratch.found[1], q = scratch.found[2];
  // Weights lean to keys like the query, which moves the mean key by as much as scores spread.
  const float lean =
      fminf(fabsf(p.scale) * sqrtf(q.Size() * k.Size()) / static_cast<float>(p.dim), 1.0f);
  CommonParts parts;
  parts.keys = sqrtf(k.Share() * k.Share() + lean * lean);
  parts.queries = q.Share();
  parts.values = v.common > 4.0f * v.spread ? -1.0f : v.spread / fmaxf(v.common, FLT_MIN);
  *CommonParts::Of(pass, b, h) = parts;
}

}  // namespace attend::cuda
