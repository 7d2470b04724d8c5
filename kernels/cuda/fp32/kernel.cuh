// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_fp32: FlashAttention on CUDA cores in exact fp32. Tiled, online softmax, O(L) memory.
// The fallback below the Tensor Core kernels, so it supports everything that problem.h describes.
//
// A block computes one tile of query rows of one head. Q stays in shared memory; tiles of K and V
// pass through it. Each has one buffer: the next K tile is loaded while O is accumulated, the next
// V tile while scores are computed. Device code, instantiated by general.cu and plain.cu.

#pragma once

#include "kernels/contract/softmax_state.h"
#include "kernels/cuda/fp32/setup.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"

namespace attend::cuda {

// One thread's state of its rows. A score's weight is 2^((score - max) * to_log2).
template <class T>
struct ThreadState {
  float scores[T::kThreadRows][T::kThreadKeys];  // scores, then weights
  float output[T::kThreadRows][4 * T::kThreadCols];
  float max[T::kThreadRows];  // largest score so far, -inf if none
  float sum[T::kThreadRows];  // over the weights of this thread's own keys
  typename T::Bits hidden;    // bit r * kThreadKeys + k: row r does not see key k
};

// ---- score --------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void ComputeScores(const float* shared, const LanePlace<T>& place,
                                              int chunks, ThreadState<T>& state) {
  const float* q_rows = shared + place.row * T::kStrideQK;
  const float* k_rows = shared + T::kOffsetK + place.col * T::kStrideQK;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) state.scores[r][i] = 0.0f;
  }
#pragma unroll(T::kUnroll)
  for (int c = 0; c < chunks; ++c) {
    float4 k[T::kThreadKeys];
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) {
      k[i] = LoadShared4(k_rows + i * T::kLaneCols * T::kStrideQK + 4 * c);
    }
#pragma unroll
    for (int r = 0; r < T::kThreadRows; ++r) {
      const float4 q = LoadShared4(q_rows + r * T::kLaneRows * T::kStrideQK + 4 * c);
      float* s = state.scores[r];
#pragma unroll
      for (int i = 0; i < T::kThreadKeys; ++i) s[i] = fmaf(q.x, k[i].x, s[i]);
#pragma unroll
      for (int i = 0; i < T::kThreadKeys; ++i) s[i] = fmaf(q.y, k[i].y, s[i]);
#pragma unroll
      for (int i = 0; i < T::kThreadKeys; ++i) s[i] = fmaf(q.z, k[i].z, s[i]);
#pragma unroll
      for (int i = 0; i < T::kThreadKeys; ++i) s[i] = fmaf(q.w, k[i].w, s[i]);
    }
  }
}

// Marks the keys of this tile that a row does not see.
template <class T>
__device__ __forceinline__ void HideKeys(const Attention& a, const BlockWork& work,
                                         const LanePlace<T>& place, int key_begin,
                                         ThreadState<T>& state) {
  Sequence sequence;
  sequence.k_len = work.k_len;
  sequence.offset = work.offset;
  // Not unrolled: the compiler would keep the ranges of all rows in registers across tiles.
#pragma unroll 1
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = work.row_begin + place.row + r * T::kLaneRows;
    const KeyRange range = VisibleKeys(a.problem.mask, sequence, row);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) {
      const int key = key_begin + place.col + i * T::kLaneCols;
      if (key < range.begin || key >= range.end) bits |= 1u << i;
    }
    state.hidden |= static_cast<typename T::Bits>(bits) << (r * T::kThreadKeys);
  }
}

// The score terms in the order of problem.h. Reads no bias of rows and keys beyond
// the true lengths.
template <class T>
__device__ __forceinline__ void ApplyTerms(const Attention& a, const BlockWork& work,
                                           const LanePlace<T>& place, int key_begin,
                                           ThreadState<T>& state) {
  const Problem& p = a.problem;
  const float slope = p.has_alibi ? a.alibi_slopes[work.b * a.alibi_stride_b + work.h] : 0.0f;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = work.row_begin + place.row + r * T::kLaneRows;
    const int64_t bias_row =
        int64_t{work.b} * a.bias.stride_b + work.h * a.bias.stride_h + row * a.bias.stride_q;
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) {
      const auto bit = typename T::Bits{1} << (r * T::kThreadKeys + i);
      const int key = key_begin + place.col + i * T::kLaneCols;
      float s = state.scores[r][i] * p.scale;
      if (p.softcap > 0.0f) s = p.softcap * tanhf(s / p.softcap);
      if (p.has_bias && row < work.q_len && !(state.hidden & bit)) {
        const float bias = LoadGlobalBias(a.bias, bias_row + key);
        if (HasBits(a) && bias < 0.0f) state.hidden |= bit;
        s += bias;
      }
      if (p.has_alibi) {
        const int64_t distance = int64_t{key} - row - work.offset;
        s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
      }
      state.scores[r][i] = s;
    }
  }
}

// ---- rescale and accumulate ---------------------------------------------------------------------

// Sets the scores of hidden keys to -inf; a key whose score is -inf by arithmetic counts as hidden.
template <class T>
__device__ __forceinline__ void MaskScores(ThreadState<T>& state) {
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) {
      const int n = r * T::kThreadKeys + i;
      if (state.hidden >> n & 1) state.scores[r][i] = NegativeInfinity();
      if (state.scores[r][i] == NegativeInfinity()) state.hidden |= typename T::Bits{1} << n;
    }
  }
}

template <class T>
__device__ __forceinline__ void MaskWeights(ThreadState<T>& state) {
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) {
      if (state.hidden >> (r * T::kThreadKeys + i) & 1) state.scores[r][i] = -0.0f;
    }
  }
}

// One step of the online softmax: new maxima, scores become weights, sums and O are rescaled.
template <class T>
__device__ __forceinline__ void UpdateSoftmax(float to_log2, ThreadState<T>& state) {
  float rescale[T::kThreadRows];
  bool unchanged = true;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    float* s = state.scores[r];
    float max = s[0];
#pragma unroll
    for (int i = 1; i < T::kThreadKeys; ++i) max = fmaxf(max, s[i]);
    max = fmaxf(state.max[r], RowMax<T>(max));
    const float reference = ReferenceOf(max);
    rescale[r] = WeightAgainst(state.max[r], reference, to_log2);
    unchanged &= rescale[r] == 1.0f;
    state.max[r] = max;
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) s[i] = WeightAgainst(s[i], reference, to_log2);
  }
  if (state.hidden != 0) MaskWeights(state);
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    float sum = state.scores[r][0];
#pragma unroll
    for (int i = 1; i < T::kThreadKeys; ++i) sum += state.scores[r][i];
    state.sum[r] = fmaf(state.sum[r], rescale[r], sum);
  }
  if (__all_sync(0xffffffffu, unchanged)) return;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
#pragma unroll
    for (int j = 0; j < 4 * T::kThreadCols; ++j) state.output[r][j] *= rescale[r];
  }
}

template <class T>
__device__ __forceinline__ void StoreWeights(float* shared, const LanePlace<T>& place, float unit,
                                             const ThreadState<T>& state) {
  float* weights = shared + T::kOffsetP + place.row * T::kKeys;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
#pragma unroll
    for (int i = 0; i < T::kThreadKeys; ++i) {
      weights[r * T::kLaneRows * T::kKeys + ((place.col + i * T::kLaneCols) ^ place.swizzle)] =
          state.scores[r][i] * unit;
    }
  }
}

// Marks dropped weights as hidden. In shared memory and not unrolled, so that it costs no registers
// in problems without dropout.
template <class T>
__device__ __forceinline__ void DropWeights(const Attention& a, const BlockWork& work,
                                            const LanePlace<T>& place, int key, float* shared) {
  float* weights = shared + T::kOffsetP + place.row * T::kKeys;
#pragma unroll 1
  for (int n = 0; n < T::kThreadRows * T::kThreadKeys; ++n) {
    const int row = n / T::kThreadKeys * T::kLaneRows;
    const int col = place.col + n % T::kThreadKeys * T::kLaneCols;
    if (KeepsWeight(a, work.b, work.h, work.row_begin + place.row + row, key + col)) continue;
    weights[row * T::kKeys + (col ^ place.swizzle)] = -0.0f;
  }
}

// O += P V. kCareful: skips the value rows of hidden keys, because 0 * NaN is NaN.
template <class T, bool kCareful>
__device__ __forceinline__ void Accumulate(const float* shared, const LanePlace<T>& place,
                                           ThreadState<T>& state) {
  const float* weights = shared + T::kOffsetP + place.row * T::kKeys;
  const float* values = shared + T::kOffsetV + 4 * place.col;
#pragma unroll(kCareful ? 1 : T::kUnroll)
  for (int c = 0; c < T::kKeys; c += 4) {
    float4 p[T::kThreadRows];
#pragma unroll
    for (int r = 0; r < T::kThreadRows; ++r) {
      p[r] = LoadShared4(weights + r * T::kLaneRows * T::kKeys + (c ^ place.swizzle));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int j = 0; j < T::kThreadCols; ++j) {
        const float4 v = LoadShared4(values + (c + e) * T::kDim + 4 * j * T::kLaneCols);
#pragma unroll
        for (int r = 0; r < T::kThreadRows; ++r) {
          const float weight = e == 0 ? p[r].x : e == 1 ? p[r].y : e == 2 ? p[r].z : p[r].w;
          if (kCareful && IsHiddenWeight(weight)) continue;
          float* o = state.output[r] + 4 * j;
          o[0] = fmaf(weight, v.x, o[0]);
          o[1] = fmaf(weight, v.y, o[1]);
          o[2] = fmaf(weight, v.z, o[2]);
          o[3] = fmaf(weight, v.w, o[3]);
        }
      }
    }
  }
}

// ---- store --------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void StoreRow(const Attention& a, void* row_data, int col_lane,
                                         bool four_aligned, float factor, float kept_scale,
                                         const float* output) {
  const DType dtype = a.problem.o_dtype();
  const int dim = static_cast<int>(a.problem.dim_v);
#pragma unroll
  for (int j = 0; j < T::kThreadCols; ++j) {
    const int col = 4 * (col_lane + j * T::kLaneCols);
    const float* o = output + 4 * j;
    const float4 v = make_float4(Mean(o[0], factor) * kept_scale, Mean(o[1], factor) * kept_scale,
                                 Mean(o[2], factor) * kept_scale, Mean(o[3], factor) * kept_scale);
    if (four_aligned && dtype == DType::kFloat32) {
      if (col < dim) *reinterpret_cast<float4*>(static_cast<float*>(row_data) + col) = v;
    } else {
      if (col < dim) StoreGlobal(row_data, dtype, col, v.x);
      if (col + 1 < dim) StoreGlobal(row_data, dtype, col + 1, v.y);
      if (col + 2 < dim) StoreGlobal(row_data, dtype, col + 2, v.z);
      if (col + 3 < dim) StoreGlobal(row_data, dtype, col + 3, v.w);
    }
  }
}

// Finishes the rows: combines the lanes' sums, adds the sink, normalises, writes O and LSE. `unit`:
// the kernel's unit of scores in those of problem.h; `kept_scale`: DropoutScale. True if an output
// is not finite though its row's weights are: either V is not, or a sum of it left fp32's range,
// which no mean of finite values does.
template <class T>
__device__ __forceinline__ bool StoreOutput(const Attention& a, const BlockWork& work,
                                            const LanePlace<T>& place, float unit, float kept_scale,
                                            ThreadState<T>& state) {
  float largest = 0.0f;
  const Problem& p = a.problem;
  const Sequence sequence = SequenceOf(a, work.b);
  void* o = Advance(a.o.data, p.o_dtype(),
                    work.b * a.o.stride_b + work.h * a.o.stride_h + sequence.q_row * a.o.stride_l);
  const bool four_aligned = FourAligned(o, p.o_dtype(), a.o.stride_l, p.dim_v);
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const float sum = RowSum<T>(state.sum[r]);
    const int row = work.row_begin + place.row + r * T::kLaneRows;
    if (row >= sequence.q_rows) continue;
    SoftmaxState<float> total;
    float factor = 0.0f;
    if (row < sequence.q_len) {
      if (state.max[r] != NegativeInfinity()) total.max = state.max[r] * unit;
      total.sum = sum;
      factor =
          OutputFactor(total, 1.0f / work.unit, p.has_sinks, p.has_sinks ? a.sinks[work.h] : 0.0f);
#pragma unroll
      for (int j = 0; j < 4 * T::kThreadCols && !NonFinite(sum); ++j) {
        largest = MaxOrNan(largest, fabsf(state.output[r][j]));
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4 * T::kThreadCols; ++j) state.output[r][j] = 0.0f;
    }
    StoreRow<T>(a, Advance(o, p.o_dtype(), row * a.o.stride_l), place.col, four_aligned, factor,
                kept_scale, state.output[r]);
    if (p.return_lse && place.col == 0) {
      a.lse[work.b * a.lse_stride_b + work.h * a.lse_stride_h + sequence.q_row + row] =
          LogSumExp(total);
    }
  }
  return NonFinite(largest);
}

// ---- the kernel ---------------------------------------------------------------------------------

// From a K tile's arrival to the weights in shared memory.
template <class T, bool kGeneral>
__device__ __forceinline__ void ScoreTile(const Attention& a, const BlockWork& work,
                                          const LanePlace<T>& place, int key, bool edge,
                                          bool may_hide, float to_log2, float* shared,
                                          ThreadState<T>& state) {
  ComputeScores<T>(shared, place, (static_cast<int>(a.problem.dim) + 3) / 4, state);
  state.hidden = 0;
  if (edge) HideKeys<T>(a, work, place, key, state);
  if constexpr (kGeneral) {
    ApplyTerms<T>(a, work, place, key, state);
  } else if (a.problem.scale < 0.0f) {  // to_log2 has the scale's magnitude only
#pragma unroll
    for (int r = 0; r < T::kThreadRows; ++r) {
#pragma unroll
      for (int i = 0; i < T::kThreadKeys; ++i) state.scores[r][i] = -state.scores[r][i];
    }
  }
  if (may_hide) MaskScores<T>(state);
  UpdateSoftmax<T>(to_log2, state);
  StoreWeights<T>(shared, place, work.unit, state);
  if (kGeneral && a.problem.dropout > 0) DropWeights<T>(a, work, place, key, shared);
}

// A block's shared memory, the kernel's own included, and its upper bound below compute capability
// 9.0.
template <class T>
inline constexpr int kFp32BlockBytes = T::kSharedBytes +
                                       static_cast<int>(sizeof(BlockWork) + sizeof(void*));
inline constexpr int kFp32BlockBytesSm80 = 163 * 1024;

// Plain kernels keep raw q.k and fold the scale's magnitude into the exponent's unit; its sign is
// applied separately. General kernels apply the scale first.
template <bool kGeneral>
__device__ __forceinline__ float ScoreToLog2(const Problem& p) {
  constexpr double kLog2EDouble = 1.4426950408889634;
  return static_cast<float>(kGeneral ? kLog2EDouble
                                     : kLog2EDouble * fabs(static_cast<double>(p.scale)));
}

// Returns as StoreOutput.
template <class T, bool kGeneral>
__device__ __forceinline__ bool ComputeTile(const Attention& a, const BlockWork& work,
                                            const LanePlace<T>& place, float* shared) {
  const DType dtype = a.problem.dtype;
  const float to_log2 = ScoreToLog2<kGeneral>(a.problem);
  ThreadState<T> state;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    state.max[r] = NegativeInfinity();
    state.sum[r] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4 * T::kThreadCols; ++j) state.output[r][j] = 0.0f;
  }
  if (work.key_begin < work.key_end) {
    LoadTile<T, T::kRows, T::kStrideQK, kGeneral>(shared, QueryRows(a, work), dtype);
    LoadKeys<T, T::kStrideQK, kGeneral>(shared + T::kOffsetK, a, work, work.key_begin);
  }
  for (int key = work.key_begin; key < work.key_end; key += T::kKeys) {
    const bool edge = key < work.full_begin || key + T::kKeys > work.full_end;
    // Whether a row of the tile may lack a key: then NaN in that key's V must not reach it.
    const bool may_hide = edge || (kGeneral && (a.problem.has_bias || a.problem.dropout > 0));
    WaitCopies();
    __syncthreads();  // K (and Q) have arrived; V's buffer is free
    LoadValues<T, T::kDim, kGeneral>(shared + T::kOffsetV, a, work, key);
    ScoreTile<T, kGeneral>(a, work, place, key, edge, may_hide, to_log2, shared, state);
    WaitCopies();
    bool careful = false;
    if (may_hide) {
      careful = ScanValues<T>(shared + T::kOffsetV, static_cast<int>(a.problem.dim_v));
    }
    careful = __syncthreads_or(careful);  // V and P have arrived; K's buffer is free
    if (key + T::kKeys < work.key_end) {
      LoadKeys<T, T::kStrideQK, kGeneral>(shared + T::kOffsetK, a, work, key + T::kKeys);
    }
    if (careful) {
      Accumulate<T, true>(shared, place, state);
    } else {
      Accumulate<T, false>(shared, place, state);
    }
  }
  return StoreOutput<T>(a, work, place, kGeneral ? 1.0f : fabsf(a.problem.scale),
                        kGeneral ? DropoutScale(a.problem.dropout) : 1.0f, state);
}

// A unit for weights, each at most one unit, for which no sum of finite values overflows. fp16
// values never need it, except for a sequence too long for any memory.
__device__ __forceinline__ float SmallUnit(const BlockWork& work) {
  const int bits = 33 - __clz(max(work.key_end - work.key_begin, 1));
  return __int_as_float((127 - bits) << 23);
}

// kGeneral = false: fp32 without score terms and dropout (any mask); true: everything.
template <class T, bool kGeneral>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FlashFp32Kernel(const __grid_constant__ RaggedParams params) {
#if __CUDA_ARCH__ < 900
  if constexpr (kFp32BlockBytesSm80 < kFp32BlockBytes<T>)
    return;  // never launched there, so not compiled
#endif
  extern __shared__ __align__(16) float shared[];
  // In shared memory, which saves registers.
  __shared__ BlockWork work;
  __shared__ const Attention* attention;  // null: no more tiles
  const LanePlace<T> place;
  for (int number = static_cast<int>(blockIdx.x);;) {
    if (threadIdx.x == 0) {
      TileWork tile;
      bool work_to_do = false;
      while (!work_to_do && FindTile(params, number, T::kRows, tile)) {
        work_to_do = SetUp<T>(*tile.attention, tile, work);
        number = ClaimTile(params);
      }
      attention = work_to_do ? tile.attention : nullptr;
    }
    __syncthreads();
    if (attention == nullptr) break;
    for (bool again = false;; again = true) {
      const bool overflowed = ComputeTile<T, kGeneral>(*attention, work, place, shared);
      // All reads of shared memory are done.
      if (!__syncthreads_or(overflowed && attention->problem.dtype != DType::kFloat16) || again)
        break;
      if (threadIdx.x == 0) work.unit = SmallUnit(work);  // read after ComputeTile's first barrier
    }
  }
  if (threadIdx.x == 0) LeaveQueue(params);
}

}  // namespace attend::cuda
