// SPDX-License-Identifier: Apache-2.0
//
// How a decoding launch combines partial answers. A split's answer is a partial in the workspace:
// for each row the largest score, the sum of weights relative to it, and their weighted mean of V.
// The block that completes the last split of a group merges the group's partials in order; the
// block that merges the last group of a unit merges the groups, and writes O and LSE. Additions are
// in the splits' order, whichever block makes them. Device code; all threads of a block call each
// function together.

#pragma once

#include <cstdint>

#include "kernels/contract/softmax_state.h"
#include "kernels/cuda/decode/segment.cuh"
#include "kernels/cuda/decode/softmax.cuh"

namespace attend::cuda::decode {

// ---- partials -----------------------------------------------------------------------------------

struct Partial {
  float* data;
  int rows;

  __device__ __forceinline__ float& Max(int row) const { return data[row]; }
  __device__ __forceinline__ float& Sum(int row) const { return data[rows + row]; }
  // Rows of kDim floats.
  __device__ __forceinline__ float* Output() const { return data + (2 * rows + 3) / 4 * 4; }
};

// A run of partials that are merged together.
struct PartialRun {
  int share;     // in which they begin
  bool goes_on;  // into other shares
  int64_t first;
};

__device__ __forceinline__ Partial PartialAt(const DecodeParams& params, int64_t index) {
  return {params.partials + index * params.partial_floats, params.partial_rows};
}

// The run of the unit's splits [first, last]: their own partials, or those of their groups.
// Partials that are entirely a block's own come first, then those that continue in other shares.
__device__ __forceinline__ PartialRun RunOf(const DecodeParams& params, const Shares& shares,
                                            const Segment& segment, int first, int last,
                                            bool of_groups) {
  PartialRun run;
  const bool begins_here = first >= segment.split;
  run.goes_on = !begins_here || last >= segment.split_end;
  run.share = begins_here ? static_cast<int>(blockIdx.x)
                          : shares.Of(segment.position + int64_t{first} * segment.split_cost);
  const int owner = run.goes_on ? static_cast<int>(gridDim.x) + run.share : run.share;
  run.first = int64_t{owner} * (params.split_partials + params.group_partials) +
              (of_groups ? params.split_partials : 0);
  return run;
}
__device__ __forceinline__ PartialRun GroupRun(const DecodeParams& params, const Shares& shares,
                                               const Segment& segment, int group) {
  const int first = group * kFanIn;
  return RunOf(params, shares, segment, first, first + GroupSize(segment.splits, group) - 1, false);
}

// ---- a split's end ------------------------------------------------------------------------------

// Exchange between the block's warps.
template <class T>
struct Exchange {
  float max[T::kKeyWarps][T::kRows];
  float sum[T::kKeyWarps][T::kRows];
  float factors[kFanIn][T::kRows];  // factors of the partials being merged
  int last;
};

// Whether an output of the thread is not finite although its row's weights are.
template <class T>
__device__ __forceinline__ bool WantsCare(const Place<T>& place, const RowState<T>& state) {
  float largest[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < T::kDim / 2; ++j) {
    float& mine = largest[j % 4 / 2];
    mine = MaxOrNan(mine, fabsf(state.output[j / 4][j % 4]));
  }
  bool wants = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool counts = place.key_begin[r] < place.key_end[r];
    wants |= counts && NonFinite(largest[r]) && !NonFinite(state.sum[r]);
  }
  return wants;
}

// Stores the thread's outputs: blocks of eight columns, from `begin` on, of its rows.
template <class T>
__device__ __forceinline__ void StoreColumns(const Segment& segment, const Place<T>& place,
                                             const Partial& partial, int begin,
                                             const float (&o)[T::kDim / 8 / T::kKeyWarps][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = RowOf(place, r);
    if (row >= segment.rows) continue;
    float* const to = partial.Output() + row * T::kDim + 8 * begin + ThreadIndex() % 4 * 2;
#pragma unroll
    for (int j = 0; j < T::kDim / 8 / T::kKeyWarps; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[j][2 * r], o[j][2 * r + 1]);
    }
  }
}

// Adds up the key warps' outputs, each warp for its share of the columns, and stores them. Columns
// of other warps are exchanged through `stage`.
template <class T>
__device__ __forceinline__ void JoinKeyWarps(const Segment& segment, const Place<T>& place,
                                             char* stage, const Partial& partial,
                                             const RowState<T>& state) {
  constexpr int kOwnBlocks = T::kDim / 8 / T::kKeyWarps;  // blocks of eight columns
  auto* const fours = reinterpret_cast<float4*>(stage) + place.row_warp * 32 + ThreadIndex() % 32;
  // Where warp `from` puts block j for warp `to`.
  const auto at = [&](int from, int to, int j) {
    const int other = from < to ? from : from - 1;
    return fours + ((to * (T::kKeyWarps - 1) + other) * kOwnBlocks + j) * T::kRowWarps * 32;
  };
#pragma unroll
  for (int to = 0; to < T::kKeyWarps; ++to) {
    if (to == place.key_warp) continue;
#pragma unroll
    for (int j = 0; j < kOwnBlocks; ++j) {
      const float* o = state.output[to * kOwnBlocks + j];
      *at(place.key_warp, to, j) = make_float4(o[0], o[1], o[2], o[3]);
    }
  }
  Sync<T>();
#pragma unroll
  for (int own = 0; own < T::kKeyWarps; ++own) {
    if (own != place.key_warp) continue;
    float sum[kOwnBlocks][4];
#pragma unroll
    for (int j = 0; j < kOwnBlocks; ++j) {
#pragma unroll
      for (int from = 0; from < T::kKeyWarps; ++from) {
        const float* o = state.output[own * kOwnBlocks + j];
        const float4 x = from == own ? make_float4(o[0], o[1], o[2], o[3]) : *at(from, own, j);
        sum[j][0] = from == 0 ? x.x : sum[j][0] + x.x;
        sum[j][1] = from == 0 ? x.y : sum[j][1] + x.y;
        sum[j][2] = from == 0 ? x.z : sum[j][2] + x.z;
        sum[j][3] = from == 0 ? x.w : sum[j][3] + x.w;
      }
    }
    StoreColumns<T>(segment, place, partial, own * kOwnBlocks, sum);
  }
}

// Writes the split's partial. If `may_want_care` and it needs care, writes nothing and returns
// false. `unit`: of the outputs' weights. `stage`: shared memory that is unused once all threads
// are here.
template <class T, class Element>
__device__ __forceinline__ bool StoreSplit(const Segment& segment, const Place<T>& place,
                                           bool may_want_care, float unit, char* stage,
                                           const Partial& partial, Exchange<T>& exchange,
                                           RowState<T>& state) {
  const int lane = ThreadIndex() % 32;
  float sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = state.sum[r] + __shfl_xor_sync(0xffffffffu, state.sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    state.sum[r] = sum[r];
    if (lane % 4 == 0) {
      exchange.max[place.key_warp][RowOf(place, r)] = state.max[r];
      exchange.sum[place.key_warp][RowOf(place, r)] = sum[r];
    }
  }
  const bool wants = may_want_care && WantsCare<T>(place, state);
  if (SyncOr<T>(wants)) return false;
  float max[2], total[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = RowOf(place, r);
    max[r] = exchange.max[0][row];
#pragma unroll
    for (int w = 1; w < T::kKeyWarps; ++w) max[r] = fmaxf(max[r], exchange.max[w][row]);
    const float reference = ReferenceOf(max[r]);
    total[r] = 0.0f;
#pragma unroll
    for (int w = 0; w < T::kKeyWarps; ++w) {
      total[r] += exchange.sum[w][row] * WeightAgainst(exchange.max[w][row], reference, kLog2E);
    }
    const float own = WeightAgainst(state.max[r], reference, kLog2E);
    const float factor = total[r] == 0.0f ? 0.0f : own / unit / total[r];
#pragma unroll
    for (int j = 0; j < T::kDim / 8; ++j) {
      state.output[j][2 * r] *= factor;
      state.output[j][2 * r + 1] *= factor;
    }
  }
  if (place.key_warp == 0 && lane % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = RowOf(place, r);
      if (row >= segment.rows) continue;
      partial.Max(row) = max[r];
      partial.Sum(row) = total[r];
    }
  }
  if constexpr (T::kKeyWarps > 1) {
    JoinKeyWarps<T>(segment, place, stage, partial, state);
  } else {
    StoreColumns<T>(segment, place, partial, 0, state.output);
  }
  return true;
}

// ---- merges -------------------------------------------------------------------------------------

// A mean of values is within their dtype's range; rounded weights may carry it a little beyond.
template <class Element>
__device__ __forceinline__ float KeepInRange(float mean) {
  constexpr float kMost = std::is_same_v<Element, __half> ? 65504.0f : 0x1.fep127f;
  return fabsf(mean) > kMost && !isinf(mean) ? copysignf(kMost, mean) : mean;
}

// Rows' totals over `count` partials, one lane per partial, and the factor of each partial's mean:
// its weight times factor(row, total, first), where `first` is true once per row.
template <class T, class Factor>
__device__ __forceinline__ void MergeTotals(const DecodeParams& params, int64_t first, int count,
                                            int rows, Exchange<T>& exchange, const Factor& factor) {
  static_assert(32 % kFanIn == 0);
  const int n = threadIdx.x % kFanIn;
  const Partial partial = PartialAt(params, first + min(n, count - 1));
#pragma unroll 1
  for (int begin = 0; begin < rows; begin += T::kThreads / kFanIn) {
    const int row = begin + threadIdx.x / kFanIn;
    const bool counts = row < rows && n < count;
    const float own = counts ? __ldcg(&partial.Max(row)) : NegativeInfinity();
    const float sum = counts ? __ldcg(&partial.Sum(row)) : 0.0f;
    SoftmaxState<float> total;
    total.max = own;
#pragma unroll
    for (int step = 1; step < kFanIn; step *= 2) {
      total.max = fmaxf(total.max, __shfl_xor_sync(0xffffffffu, total.max, step));
    }
    const float weight = sum * WeightAgainst(own, ReferenceOf(total.max), kLog2E);
    total.sum = weight;
#pragma unroll
    for (int step = 1; step < kFanIn; step *= 2) {
      total.sum += __shfl_xor_sync(0xffffffffu, total.sum, step);
    }
    if (!counts) continue;
    const float inverse = total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
    exchange.factors[n][row] = weight * inverse * factor(row, total, n == 0);
  }
}

// The mean of four columns of a row over `count` partials.
template <class T>
__device__ __forceinline__ float4 MergeColumns(const DecodeParams& params, int64_t first, int count,
                                               int row, int column, const Exchange<T>& exchange) {
  constexpr int kAtOnce = 8;
  const float* const from = PartialAt(params, first).Output() + row * T::kDim + column;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce) {
    float4 x[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      // Volatile: the compiler would otherwise sink each load to its use, and wait for each in
      // turn.
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[n].x), "=f"(x[n].y), "=f"(x[n].z), "=f"(x[n].w)
                   : "l"(from + min(begin + n, count - 1) * params.partial_floats)
                   : "memory");
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const bool counts = begin + n < count;
      const float factor = exchange.factors[min(begin + n, count - 1)][row];
      sum.x = counts ? fmaf(factor, x[n].x, sum.x) : sum.x;
      sum.y = counts ? fmaf(factor, x[n].y, sum.y) : sum.y;
      sum.z = counts ? fmaf(factor, x[n].z, sum.z) : sum.z;
      sum.w = counts ? fmaf(factor, x[n].w, sum.w) : sum.w;
    }
  }
  return sum;
}

// Merges `count` partials: factor as in MergeTotals, then store(row, column, mean) for every four
// columns.
template <class T, class Factor, class Store>
__device__ __forceinline__ void Merge(const DecodeParams& params, const Segment& segment,
                                      int64_t first, int count, Exchange<T>& exchange,
                                      const Factor& factor, const Store& store) {
  constexpr int kRowFours = T::kDim / 4;
  MergeTotals<T>(params, first, count, segment.rows, exchange, factor);
  Sync<T>();
#pragma unroll 1
  for (int n = threadIdx.x; n < segment.rows * kRowFours; n += T::kThreads) {
    const int row = n / kRowFours, column = n % kRowFours * 4;
    store(row, column, MergeColumns<T>(params, first, count, row, column, exchange));
  }
}

template <class T>
__device__ __forceinline__ void MergeToPartial(const DecodeParams& params, const Segment& segment,
                                               int64_t first, int count, const Partial& to,
                                               Exchange<T>& exchange) {
  Merge<T>(
      params, segment, first, count, exchange,
      [&](int row, const SoftmaxState<float>& total, bool first_lane) {
        if (first_lane) {
          to.Max(row) = total.max;
          to.Sum(row) = total.sum;
        }
        return 1.0f;
      },
      [&](int row, int column, float4 mean) {
        *reinterpret_cast<float4*>(to.Output() + row * T::kDim + column) = mean;
      });
}

// Stores four columns of O, from element `index` on.
template <class Element>
__device__ __forceinline__ void StoreFour(const Attention& a, int64_t index, float4 x) {
  if (a.problem.o_float32) {
    float* const floats = static_cast<float*>(a.o.data) + index;
    floats[0] = x.x;
    floats[1] = x.y;
    floats[2] = x.z;
    floats[3] = x.w;
    return;
  }
  uint16_t* const to = static_cast<uint16_t*>(a.o.data) + index;
  const uint32_t low = Pack<Element>(KeepInRange<Element>(x.x), KeepInRange<Element>(x.y));
  const uint32_t high = Pack<Element>(KeepInRange<Element>(x.z), KeepInRange<Element>(x.w));
  if ((reinterpret_cast<uint64_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  } else {
    to[0] = static_cast<uint16_t>(low);
    to[1] = static_cast<uint16_t>(low >> 16);
    to[2] = static_cast<uint16_t>(high);
    to[3] = static_cast<uint16_t>(high >> 16);
  }
}

// Writes O and LSE.
template <class T, class Element>
__device__ __forceinline__ void MergeToOutput(const DecodeParams& params, const Segment& segment,
                                              int64_t first, int count, Exchange<T>& exchange) {
  const Attention& a = *segment.attention;
  const Problem& p = a.problem;
  const Sequence& s = segment.sequence;
  Merge<T>(
      params, segment, first, count, exchange,
      [&](int row, SoftmaxState<float> total, bool first_lane) {
        const RowPlace place = PlaceRow(segment, row);
        if (!place.exists) total = SoftmaxState<float>();  // padding
        float factor = 1.0f;
        if (place.exists && p.has_sinks) {
          const float sum = total.sum;
          factor = sum * OutputFactor(total, 1.0f, true, a.sinks[place.head]);
        }
        if (p.return_lse && first_lane) {
          a.lse[segment.b * a.lse_stride_b + place.head * a.lse_stride_h + s.q_row + place.i] =
              LogSumExp(total);
        }
        return factor;
      },
      [&](int row, int column, float4 mean) {
        if (column >= segment.columns_v) return;
        const RowPlace place = PlaceRow(segment, row);
        if (!place.exists) mean = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // padding
        const int64_t row_begin = segment.b * a.o.stride_b + place.head * a.o.stride_h +
                                  (s.q_row + place.i) * a.o.stride_l;
        StoreFour<Element>(a, row_begin + column, mean);
      });
}

// Counts `done` more of a run's `count` partials. True for the block that completes it, to which
// the other blocks' writes are then visible.
template <class T>
__device__ __forceinline__ bool Complete(const PartialRun& run, unsigned int* counters, int done,
                                         int count, Exchange<T>& exchange) {
  if (!run.goes_on) {  // all of them are this block's
    Sync<T>();
    return true;
  }
  Sync<T>();
  if (threadIdx.x == 0) {
    unsigned int* const counter = counters + run.share;
    unsigned int before;
    // Releases this block's writes, gathered by the barrier, and acquires those of the others.
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(done)
                 : "memory");
    const bool last = before + done == count;
    if (last) *counter = 0;  // reset; no other block will access it
    exchange.last = last;
  }
  Sync<T>();
  return exchange.last != 0;
}

// Call after `split`, the last of its group or of the segment: `done` splits of the group, whose
// run is `run`, are this block's. Merges whatever is complete.
template <class T, class Element>
__device__ __forceinline__ void FinishSplits(const DecodeParams& params, const Shares& shares,
                                             const Segment& segment, const PartialRun& run,
                                             int split, int done, Exchange<T>& exchange) {
  const int group = split / kFanIn;
  const int size = GroupSize(segment.splits, group);
  if (!Complete<T>(run, params.counters->splits, done, size, exchange)) return;
  const int groups = GroupCount(segment.splits);
  if (groups == 1) {
    MergeToOutput<T, Element>(params, segment, run.first, size, exchange);
    Sync<T>();
    return;
  }
  const PartialRun whole = RunOf(params, shares, segment, 0, segment.splits - 1, true);
  MergeToPartial<T>(params, segment, run.first, size, PartialAt(params, whole.first + group),
                    exchange);
  Sync<T>();
  // If the unit is entirely this block's, groups complete in order.
  if (!whole.goes_on && group != groups - 1) return;
  if (!Complete<T>(whole, params.counters->groups, 1, groups, exchange)) return;
  MergeToOutput<T, Element>(params, segment, whole.first, groups, exchange);
  Sync<T>();
}

}  // namespace attend::cuda::decode
