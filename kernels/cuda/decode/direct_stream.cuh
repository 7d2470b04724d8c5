// SPDX-License-Identifier: Apache-2.0
//
// cuda_decode_sm80 for up to sixteen packed rows (direct.cuh): the splits of a segment. Device
// code; all threads of a block call each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/decode/between_splits.cuh"
#include "kernels/cuda/decode/direct.cuh"

namespace attend::cuda::decode {

template <class T>
struct DirectShared {
  Walk<T> walk;
  Segment segment;
  Exchange<T> exchange;
  DirectRows<T> rows;
};

// ---- a split's end ------------------------------------------------------------------------------

// Whether an output of the lane is not finite although the sum of its row's weights is. If that sum
// is not finite either, columns of K that were read twice may be the cause: Q is 0 there, but 0 *
// Inf is NaN.
template <class T>
__device__ __forceinline__ bool DirectWantsCare(const Segment& segment, const DirectRows<T>& rows,
                                                const DirectState<T>& state) {
  const bool again = !T::kExact && segment.columns_k < T::kDim;
  bool wants = false;
#pragma unroll
  for (int r = 0; r < T::kLaneRows; ++r) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < T::kDim / 16; ++j) {
      largest = MaxOrNan(largest, fabsf(state.output[j][r / 2][r % 2]));
      largest = MaxOrNan(largest, fabsf(state.output[j][r / 2][r % 2 + 2]));
    }
    const int row = DirectRow(r);
    wants |= rows.begin[row] < rows.end[row] && NonFinite(largest) &&
             (again || !NonFinite(state.sum[r]));
  }
  return wants;
}

// Adds up the lanes' sums, and shares them with the other warps.
template <class T>
__device__ __forceinline__ void ShareTotals(Exchange<T>& exchange, DirectState<T>& state) {
  const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
#pragma unroll
  for (int r = 0; r < T::kLaneRows; ++r) {
    float& sum = state.sum[r];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane < 4) {
      exchange.max[warp][DirectRow(r)] = state.max[r];
      exchange.sum[warp][DirectRow(r)] = sum;
    }
  }
}

// Factor of the warp's outputs of the lane's row r. The first warp stores the totals.
template <class T>
__device__ __forceinline__ float SplitFactor(const Segment& segment, const Exchange<T>& exchange,
                                             float own_max, float unit, int r,
                                             const Partial& partial) {
  const int row = DirectRow(r);
  float max = exchange.max[0][row];
#pragma unroll
  for (int w = 1; w < T::kKeyWarps; ++w) max = fmaxf(max, exchange.max[w][row]);
  const float reference = ReferenceOf(max);
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < T::kKeyWarps; ++w) {
    total += exchange.sum[w][row] * WeightAgainst(exchange.max[w][row], reference, kLog2E);
  }
  if (ThreadIndex() < 4 && row < segment.rows) {
    partial.Max(row) = max;
    partial.Sum(row) = total;
  }
  return total == 0.0f ? 0.0f : WeightAgainst(own_max, reference, kLog2E) / unit / total;
}

// Adds up the warps' outputs in shared memory, in fixed order, and stores them.
template <class T>
__device__ __forceinline__ void StoreSums(const Segment& segment, const float4* join,
                                          const Partial& partial) {
  const int lane = ThreadIndex() % 32;
#pragma unroll
  for (int i = 0; i < T::kLaneFours / T::kKeyWarps; ++i) {
    const int four = i * T::kKeyWarps + ThreadIndex() / 32;
    float4 sum = join[four * 32 + lane];
#pragma unroll
    for (int w = 1; w < T::kKeyWarps; ++w) {
      const float4 x = join[(w * T::kLaneFours + four) * 32 + lane];
      sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    const int row = DirectRow(four / (2 * T::kSpans));
    const int column = four / 2 % T::kSpans * 64 + lane / 4 * 8 + four % 2 * 4;
    if (row >= segment.rows) continue;
    *reinterpret_cast<float4*>(partial.Output() + row * T::kDim + column) = sum;
  }
}

// Writes the split's partial. If `may_want_care` and it needs care, writes nothing and returns
// false. `unit`: of the outputs' weights.
template <class T, class Element>
__device__ __forceinline__ bool StoreDirect(DirectShared<T>& block, bool may_want_care, float unit,
                                            char* shared, const Partial& partial,
                                            DirectState<T>& state) {
  ShareTotals<T>(block.exchange, state);
  const bool wants = may_want_care && DirectWantsCare<T>(block.segment, block.rows, state);
  if (__syncthreads_or(wants)) return false;
  auto* const join = reinterpret_cast<float4*>(shared);
  auto* const own = join + (ThreadIndex() / 32 * T::kLaneFours) * 32 + ThreadIndex() % 32;
#pragma unroll
  for (int r = 0; r < T::kLaneRows; ++r) {
    const float f = SplitFactor<T>(block.segment, block.exchange, state.max[r], unit, r, partial);
#pragma unroll
    for (int j = 0; j < T::kDim / 16; j += 2) {
      const float* const low = state.output[j][r / 2] + r % 2;
      const float* const high = state.output[j + 1][r / 2] + r % 2;
      own[(r * 2 * T::kSpans + j / 2) * 32] =
          make_float4(low[0] * f, low[2] * f, high[0] * f, high[2] * f);
    }
  }
  __syncthreads();
  StoreSums<T>(block.segment, join, partial);
  return true;
}

// ---- values that are not finite -----------------------------------------------------------------

// O += P V for the non-finite elements of V only, of rows that see their key. `p` is not yet
// transposed. Slow.
template <class T, class Element>
__device__ __forceinline__ void AddNonFinite(const DirectBlock& values, const DirectScores<T>& s,
                                             const DirectWeights<T>& p, DirectState<T>& state) {
  const int lane = ThreadIndex() % 32;
  DirectWeights<T> marked;  // -0: hidden
#pragma unroll
  for (int n = 0; n < 2 * T::kEights; ++n) {
    const float* const of = s[n / 2] + n % 2 * 2;
    uint32_t pair = p[n / 2][n % 2];
    if (of[0] == NegativeInfinity()) pair = (pair & 0xffff0000u) | 0x8000u;
    if (of[1] == NegativeInfinity()) pair = (pair & 0xffffu) | 0x80000000u;
    marked[n / 2][n % 2] = pair;
  }
#pragma unroll 1
  for (int key = 0; key < T::kWarpKeys; ++key) {
    const char* const row = values.Row(key);
    float2 weights[T::kEights];
#pragma unroll
    for (int n = 0; n < T::kEights; ++n) {
      const uint32_t own = key < 8 ? marked[n][0] : marked[n][1];
      weights[n] = Unpack<Element>(__shfl_sync(0xffffffffu, own, key % 8 * 4 + lane % 4));
    }
#pragma unroll
    for (int j = 0; j < T::kDim / 16; ++j) {
      const int at = min(j / 4 * 128 + lane / 4 * 16, values.limit) + j % 4 * 4;
      const float2 x = Unpack<Element>(__ldg(reinterpret_cast<const uint32_t*>(row + at)));
#pragma unroll
      for (int n = 0; n < T::kEights; ++n) {
        float* const o = state.output[j][n];
        const bool sees[2] = {!IsHiddenWeight(weights[n].x), !IsHiddenWeight(weights[n].y)};
        if (sees[0] && NonFinite(x.x)) o[0] = fmaf(weights[n].x, x.x, o[0]);
        if (sees[1] && NonFinite(x.x)) o[1] = fmaf(weights[n].y, x.x, o[1]);
        if (sees[0] && NonFinite(x.y)) o[2] = fmaf(weights[n].x, x.y, o[2]);
        if (sees[1] && NonFinite(x.y)) o[3] = fmaf(weights[n].y, x.y, o[3]);
      }
    }
  }
}

// Zeroes NaN and Inf in the values before the product, as 0 * NaN is NaN.
template <class T, class Element>
__device__ __forceinline__ void TakeOutNonFinite(DirectValues<T>& v) {
#pragma unroll
  for (int n = 0; n < 16 * T::kPartSpans; ++n) {
    uint32_t& pair = v[n / 4 / T::kPartSpans][n / 4 % T::kPartSpans][n % 4];
    pair &= ~((NonFinitePair<Element>(pair) >> 15) * 0xffffu);
  }
}

// One block of keys of a split that needs care; no copies are in flight.
template <class T, class Element>
__device__ __forceinline__ void CarefulDirect(const Segment& segment, const DirectQuery<T>& query,
                                              const DirectRows<T>& rows, int key, int end,
                                              DirectState<T>& state) {
  const int page = FindPage(segment, key, end);
  DirectScores<T> chains[2];
#pragma unroll
  for (int part = 0; part < T::kParts; ++part) {
    DirectKeys<T> k;
    LoadKeys<T, true>(segment, key, page, end, part, k);
    Score<T, Element>(query, k, part, chains);
  }
  DirectScores<T> s;
  FinishScores<T>(segment, rows, key, chains, s);
  DirectWeights<T> p;
  Weigh<T, Element>(kSmallUnit<Element>, s, state, p);
  AddNonFinite<T, Element>(DirectBlock(segment, segment.v, segment.columns_v, key, page, end), s, p,
                           state);
  Turn<T>(p);
#pragma unroll
  for (int part = 0; part < T::kParts; ++part) {
    DirectValues<T> v;
    LoadValues<T, true>(segment, key, page, end, part, v);
    TakeOutNonFinite<T, Element>(v);
    Accumulate<T, Element>(p, v, part, state);
  }
}

// ---- splits -------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ int WarpKey() {
  return ThreadIndex() / 32 * T::kWarpKeys;
}

// As in kernel.cuh: streams the segment's keys from split `split` on, which must have some. Returns
// the split that it could not close because it needs care, or the segment's end.
template <class T, class Element>
__device__ __forceinline__ int Stream(const DecodeParams& params, DirectShared<T>& block,
                                      char* shared, OpenGroup& group, int split, bool& care) {
  const Segment& segment = block.segment;
  int key = RangeOf<T>(segment, split).begin;  // of the first warp
  const int end = RangeOf<T>(segment, segment.split_end - 1).end;
  int page = FindPage(segment, key + WarpKey<T>(), end);
  int next_page = FindPage(segment, key + WarpKey<T>() + T::kKeys, end);
  DirectKeys<T> k;
  DirectValues<T> v;
  LoadKeys<T, T::kExact>(segment, key + WarpKey<T>(), page, end, 0, k);
  LoadValues<T, T::kExact>(segment, key + WarpKey<T>(), page, end, 0, v);
  DirectQuery<T> query;
  LoadQuery<T>(segment, shared, query);
  SetRows<T>(segment, block.rows);
  Open(params, block, split, group);
  int split_end = RangeOf<T>(segment, split).end;
  DirectState<T> state;
  Start<T>(state);
  __syncthreads();
#pragma unroll 1
  for (; key < end; key += T::kKeys) {
    const int own = key + WarpKey<T>();
    const bool more = key + T::kKeys < end;
    const bool closes = key + T::kKeys >= split_end;
    DirectScores<T> chains[2];
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      Score<T, Element>(query, k, part, chains);
      if (part + 1 < T::kParts) {
        LoadKeys<T, T::kExact>(segment, own, page, end, part + 1, k);
      } else if (more) {
        LoadKeys<T, T::kExact>(segment, own + T::kKeys, next_page, end, 0, k);
      }
    }
    DirectScores<T> s;
    FinishScores<T>(segment, block.rows, own, chains, s);
    DirectWeights<T> p;
    Weigh<T, Element>(1.0f, s, state, p);
    Turn<T>(p);
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      Accumulate<T, Element>(p, v, part, state);
      if (part + 1 < T::kParts) {
        LoadValues<T, T::kExact>(segment, own, page, end, part + 1, v);
      } else if (more && !(T::kHoldsBack && closes)) {
        LoadValues<T, T::kExact>(segment, own + T::kKeys, next_page, end, 0, v);
      }
    }
    page = next_page;
    if (more) next_page = FindPage(segment, own + 2 * T::kKeys, end);
    if (!closes) continue;
    Open(params, block, split, group);
    const Partial partial = PartialAt(params, group.run.first + split % kFanIn);
    care = !StoreDirect<T, Element>(block, true, 1.0f, shared, partial, state);
    if (care) break;
    AfterSplit<T, Element>(params, block, group, split);
    ++split;
    if (more) split_end = RangeOf<T>(segment, split).end;
    if (T::kHoldsBack && more) LoadValues<T, T::kExact>(segment, own + T::kKeys, page, end, 0, v);
    Start<T>(state);
  }
  __syncthreads();
  return split;
}

// Recomputes a split whose values are not finite or whose sums overflowed fp32; also handles a
// split without keys.
template <class T, class Element>
__device__ __forceinline__ void CarefulSplit(const DecodeParams& params, DirectShared<T>& block,
                                             char* shared, OpenGroup& group, int split) {
  const Segment& segment = block.segment;
  const SplitRange range = RangeOf<T>(segment, split);
  DirectQuery<T> query;
  LoadQuery<T>(segment, shared, query);
  SetRows<T>(segment, block.rows);
  __syncthreads();
  DirectState<T> state;
  Start<T>(state);
#pragma unroll 1
  for (int key = range.begin; key < range.end; key += T::kKeys) {
    CarefulDirect<T, Element>(segment, query, block.rows, key + WarpKey<T>(), range.end, state);
  }
  Open(params, block, split, group);
  const Partial partial = PartialAt(params, group.run.first + split % kFanIn);
  (void)StoreDirect<T, Element>(block, false, kSmallUnit<Element>, shared, partial, state);
  AfterSplit<T, Element>(params, block, group, split);
  __syncthreads();  // the exchange has been read
}

template <class T, class Element>
__device__ __forceinline__ void ComputeSegment(const DecodeParams& params, DirectShared<T>& block,
                                               char* shared) {
  const Segment& segment = block.segment;
  if (segment.has_bits) FindHidden<T>(block.segment);
  OpenGroup group;
#pragma unroll 1
  for (int split = segment.split; split < segment.split_end;) {
    const SplitRange range = RangeOf<T>(segment, split);
    bool care = false;
    if (range.begin < range.end) {
      split = Stream<T, Element>(params, block, shared, group, split, care);
      if (!care) continue;
    }
    CarefulSplit<T, Element>(params, block, shared, group, split);
    ++split;
  }
}

}  // namespace attend::cuda::decode
