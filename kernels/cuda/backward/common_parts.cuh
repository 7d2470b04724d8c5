// SPDX-License-Identifier: Apache-2.0
//
// How much a head's keys, values and queries have in common, which decides where O's rounding
// spoils gradients: dQ receives delta's error times the row's mean key, so it matters where keys
// have much in common; and where values do, because dS is then made of differences that are small
// beside O. Device code.

#pragma once

#include <cfloat>

#include "kernels/contract/limits.h"
#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// Threshold of the squared ratio of the two effects, from which delta is measured instead.
inline constexpr float kSpoilt = 2.25f;

// Per head of a sequence, as RowTerms needs it.
struct alignas(16) CommonParts {
  float keys = 0.0f;     // share of a key's length that is a row's mean key
  float queries = 0.0f;  // the same for queries
  float values = 0.0f;   // squared spread of values relative to their mean; negative: almost none

  static __device__ __forceinline__ CommonParts* Of(const BackwardPass& pass, int64_t b,
                                                    int64_t h) {
    const Problem& p = pass.attention.problem;
    auto* const first =
        reinterpret_cast<CommonParts*>(pass.doubt + TermsOfHead(p) * p.heads_q + kTermSlack);
    return first + b * p.heads_q + h;
  }

  // Whether delta's error spoils the gradients of a row that sees `count` keys. `own`: squared
  // deviation of O from the mean of its neighbours, relative to O. O's rounding costs delta about
  // the roundoff times O; rounding dS costs about the roundoff times the row's own part, to the
  // extent that weights are concentrated (they are spread over all keys at most). Rows whose O is
  // equal up to rounding share their errors, which then add up in dK as queries do.
  __device__ __forceinline__ bool Spoil(float own, int64_t count, DType dtype) const {
    if (values == 0.0f) return false;
    const float unit = dtype == DType::kFloat16 ? 0x1p-12f : 0x1p-9f;
    const float share = keys + (own < 4.0f * unit * unit ? queries : 0.0f);
    return values < 0.0f || share * share > kSpoilt * (own + values / static_cast<float>(count));
  }
};
static_assert(sizeof(CommonParts) == kHeadPartBytes);

// The square of a tensor's mean row, and the rows' mean squared deviation from it.
struct Moments {
  float common = 0.0f, spread = 0.0f;

  __device__ __forceinline__ float Size() const { return common + spread; }
  // Share of a row's length that is the mean's.
  __device__ __forceinline__ float Share() const {
    return common > 0.0f ? sqrtf(common / Size()) : 0.0f;
  }
};

// Eight 16-bit elements, of which `count` exist; 0 in place of the others. `whole`: all exist,
// 16-byte aligned.
__device__ __forceinline__ uint4 LoadEight(const void* data, int64_t index, int64_t count,
                                           bool whole) {
  const auto* const from = static_cast<const uint16_t*>(data) + index;
  if (whole) return *reinterpret_cast<const uint4*>(from);
  uint32_t x[4] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n < count) x[n / 2] |= static_cast<uint32_t>(from[n]) << 16 * (n % 2);
  }
  return make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ float ElementOf(DType dtype, const uint4& eight, int n) {
  const uint32_t pair = n < 4 ? (n < 2 ? eight.x : eight.y) : (n < 6 ? eight.z : eight.w);
  return Widen(dtype, static_cast<uint16_t>(pair >> 16 * (n % 2)));
}

template <class T>
__device__ __forceinline__ T WarpSum(T x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Up to kSamples rows of one head of a tensor, evenly spaced. A warp has every kWarps-th of them, a
// lane eight columns.
struct SampledRows {
  static constexpr int kSamples = 32;
  static constexpr int kWarps = 8;
  uint4 rows[kSamples / kWarps] = {};

  // The head's rows begin at element `first`.
  __device__ __forceinline__ void Load(const ConstTensorView& x, int64_t first, int64_t count,
                                       int64_t dim) {
    const int64_t column = threadIdx.x % 32 * 8;
    const int64_t samples = min(count, int64_t{kSamples});
    const int64_t step = count / max(samples, int64_t{1}) * x.stride_l;
    const bool whole = reinterpret_cast<uint64_t>(x.data) % 16 == 0 && first % 8 == 0 &&
                       x.stride_l % 8 == 0 && column + 8 <= dim;
#pragma unroll
    for (int n = 0; n < kSamples / kWarps; ++n) {
      const int64_t row = threadIdx.x / 32 + kWarps * n;
      if (row >= samples || column >= dim) continue;
      rows[n] = LoadEight(x.data, first + row * step + column, dim - column, whole);
    }
  }
};

// Moments of three tensors, from their sampled rows. In shared memory.
struct MomentScratch {
  static constexpr int kTensors = 3;
  static constexpr int kWarps = SampledRows::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  float sums[kTensors][kWarps][kHeadDimMax];
  float squares[kTensors][kWarps];
  float commons[kTensors][kWarps];
  static_assert(kThreads == kHeadDimMax);

  __device__ __forceinline__ void Add(int which, const SampledRows& sampled, DType dtype) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    float square = 0.0f;
    float own[8] = {};
#pragma unroll
    for (const uint4& row : sampled.rows) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float x = ElementOf(dtype, row, c);
        own[c] += x;
        square = fmaf(x, x, square);
      }
    }
    auto* const to = reinterpret_cast<float4*>(&sums[which][warp][8 * lane]);
    to[0] = make_float4(own[0], own[1], own[2], own[3]);
    to[1] = make_float4(own[4], own[5], own[6], own[7]);
    square = WarpSum(square);
    if (lane == 0) squares[which][warp] = square;
  }
  // Call between two barriers; each thread adds up one column.
  __device__ __forceinline__ void AddColumns() {
#pragma unroll
    for (int which = 0; which < kTensors; ++which) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kWarps; ++n) sum += sums[which][n][threadIdx.x];
      const float common = WarpSum(sum * sum);
      if (threadIdx.x % 32 == 0) commons[which][threadIdx.x / 32] = common;
    }
  }
  // Moments of a tensor with `count` rows. The sample mean's own variance is subtracted from its
  // square.
  __device__ __forceinline__ Moments Found(int which, int64_t count) const {
    const float samples =
        fmaxf(static_cast<float>(min(count, int64_t{SampledRows::kSamples})), 1.0f);
    float size = 0.0f, common = 0.0f;
    for (int n = 0; n < kWarps; ++n) {
      size += squares[which][n];
      common += commons[which][n];
    }
    size /= samples;
    common /= samples * samples;
    const float spread = fmaxf(size - common, 0.0f) * samples / fmaxf(samples - 1.0f, 1.0f);
    return {fmaxf(common - spread / samples, 0.0f), spread};
  }
};

// Computes those of the `head`th of all sequences' heads. All threads of a block.
__device__ __forceinline__ void StoreCommonParts(const BackwardPass& pass, uint32_t head,
                                                 MomentScratch& scratch) {
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const auto heads = static_cast<uint32_t>(p.heads_q);
  const int64_t b = head / heads;
  const int64_t h = head % heads;
  const Sequence s = SequenceOf(a, b);
  const auto first = [&](const ConstTensorView& x, int64_t head, int64_t row) {
    return b * x.stride_b + head * x.stride_h + row * x.stride_l;
  };
  const int64_t kv_head = h / p.group();
  SampledRows keys, values, queries;
  keys.Load(a.k, first(a.k, kv_head, s.k_row), s.k_len, p.dim);
  values.Load(a.v, first(a.v, kv_head, s.k_row), s.k_len, p.dim_v);
  queries.Load(a.q, first(a.q, h, s.q_row), s.q_len, p.dim);
  scratch.Add(0, keys, p.dtype);
  scratch.Add(1, values, p.dtype);
  scratch.Add(2, queries, p.dtype);
  __syncthreads();
  scratch.AddColumns();
  __syncthreads();
  if (threadIdx.x >= 32) return;
  asm volatile("" : "+r"(head));  // the lengths again, as registers are few until here
  const Sequence lengths = SequenceOf(a, head / heads);
  const int which = min(static_cast<int>(threadIdx.x), 2);  // a lane for each tensor
  const Moments found = scratch.Found(which, which < 2 ? lengths.k_len : lengths.q_len);
  const auto of_lane = [&](int lane) {
    return Moments{__shfl_sync(0xffffffffu, found.common, lane),
                   __shfl_sync(0xffffffffu, found.spread, lane)};
  };
  const Moments k = of_lane(0);
  const Moments v = of_lane(1);
  const Moments q = of_lane(2);
  if (threadIdx.x != 0) return;
  // Weights favour keys like the query, which moves the mean key by as much as scores spread.
  const float lean =
      fminf(fabsf(p.scale) * sqrtf(q.Size() * k.Size()) / static_cast<float>(p.dim), 1.0f);
  CommonParts parts;
  parts.keys = sqrtf(k.Share() * k.Share() + lean * lean);
  parts.queries = q.Share();
  parts.values = v.common > 4.0f * v.spread ? -1.0f : v.spread / fmaxf(v.common, FLT_MIN);
  *CommonParts::Of(pass, head / heads, head % heads) = parts;
}

}  // namespace attend::cuda
