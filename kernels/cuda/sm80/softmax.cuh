// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80 between the two matrix products: score terms, masks, and the online softmax.
// Device code; a warp calls each function together.

#pragma once

#include <cstdint>

#include "kernels/contract/limits.h"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/tanh.cuh"
#include "kernels/cuda/sm80/tile.cuh"

namespace attend::cuda::sm80 {

// Description of a block's tile. In shared memory, because accumulators need all registers. Rows
// and keys within a sequence fit 32 bits (limits.h).
struct BlockWork {
  const Attention* attention;  // null: no work, and none will follow
  Source q, k, v;
  char* o;           // row 0 of the sequence
  int64_t o_stride;  // bytes between rows
  float* lse;        // row 0 of the sequence; null: not wanted
  int b, h;
  int row_begin;             // first query row
  int q_len, q_rows, k_len;  // see Sequence
  int offset;                // of the diagonal
  int begin_shift;           // row i sees the keys [i + begin_shift, i + end_shift) that exist
  int end_shift;
  int key_begin, key_end;    // keys that some row sees, begin rounded down to a tile
  int full_begin, full_end;  // keys that every row sees
  int warp_flip;             // see WarpPlace
  bool o_fast;               // O can be written in 16-byte chunks
  bool o_float32;
  bool has_bias, has_sink;
  float sink;
  float query_sign;  // factor of Q: 1 or -1
  float to_log2;     // a weight is 2^(score * to_log2 - base)
  int spoiled[2];    // see NoteNonFinite
  uint32_t asked;    // bits 0-15: slices that must be repaired; from 16 on: marked
  PageSource pages;  // if the keys are paged
};

// The scores of one tile: [slice][eight keys][fragment, see MultiplyAdd].
template <class T>
using Scores = float[T::kSlices][T::kKeyBlocks][4];

// One thread's state of its rows; row 2 * slice + half has fragment elements 2 * half and the next.
template <class T>
struct RowState {
  float output[T::kSlices][T::kDim / 8][4];
  float base[T::kThreadRows];  // subtracted in the exponent: some score's, rounded once
  float sum[T::kThreadRows];   // over the weights of this thread's keys
};

// Which of the block's groups of kWarpRows rows the warp computes. The order alternates between
// tiles: under a causal mask the last rows see most keys, and a warp cannot change schedulers.
__device__ __forceinline__ int WarpPlace(const BlockWork& work) {
  return ThreadIndex() / 32 ^ work.warp_flip;
}
template <class T>
__device__ __forceinline__ int WarpRow(const BlockWork& work) {
  return work.row_begin + WarpPlace(work) * T::kWarpRows;
}

// The thread's row `r` (see RowState) within the sequence.
template <class T>
__device__ __forceinline__ int RowOf(const BlockWork& work, int r) {
  return WarpRow<T>(work) + r / 2 * 16 + r % 2 * 8 + ThreadIndex() % 32 / 4;
}

// Whether some row of the warp sees some key of the tile.
template <class T>
__device__ __forceinline__ bool WarpSees(const BlockWork& work, int key) {
  const int first = WarpRow<T>(work);
  const int last = min(first + T::kWarpRows, work.q_len) - 1;
  return first <= last && key < last + work.end_shift && key + T::kKeys > first + work.begin_shift;
}

// Whether all rows of the warp see all keys of the tile; padding rows, which are never stored, do
// not count.
template <class T>
__device__ __forceinline__ bool WarpSeesAll(const BlockWork& work, int key) {
  const int first = WarpRow<T>(work);
  const int last = min(first + T::kWarpRows, work.q_len) - 1;
  return key >= last + work.begin_shift &&
         key + T::kKeys <= min(first + work.end_shift, work.k_len);
}

// The first of the thread's two adjacent keys among eight.
__device__ __forceinline__ int KeyOfLane() { return ThreadIndex() % 4 * 2; }

// ---- terms and masks ----------------------------------------------------------------------------

// Adds one row's bias, whose key 0 is at `bias`. Reads no key at or beyond k_len.
template <class T, class Value>
__device__ __forceinline__ void AddBiasRow(const Value* bias, int key, int k_len, int r,
                                           Scores<T>& s) {
#pragma unroll
  for (int n = 0; n < T::kKeyBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (key + 8 * n + e < k_len) {
        s[r / 2][n][r % 2 * 2 + e] += static_cast<float>(bias[key + 8 * n + e]);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void AddBias(const Attention& a, const BlockWork& work, int key,
                                        Scores<T>& s) {
  const BiasView& bias = a.bias;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = RowOf<T>(work, r);
    if (row >= work.q_len) continue;
    const int64_t at = work.b * bias.stride_b + work.h * bias.stride_h + row * bias.stride_q;
    const int first = key + KeyOfLane();
    if (bias.dtype == DType::kFloat32) {
      AddBiasRow<T>(static_cast<const float*>(bias.data) + at, first, work.k_len, r, s);
    } else if (bias.dtype == DType::kFloat16) {
      AddBiasRow<T>(static_cast<const __half*>(bias.data) + at, first, work.k_len, r, s);
    } else {
      AddBiasRow<T>(static_cast<const __nv_bfloat16*>(bias.data) + at, first, work.k_len, r, s);
    }
  }
}

template <class T>
__device__ __forceinline__ void AddAlibi(const Attention& a, const BlockWork& work, int key,
                                         Scores<T>& s) {
  const float slope = a.alibi_slopes[work.b * a.alibi_stride_b + work.h];
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int distance = key + KeyOfLane() - RowOf<T>(work, r) - work.offset;
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[r / 2][n][r % 2 * 2 + e];
        score -= slope * fabsf(static_cast<float>(distance + 8 * n + e));
      }
    }
  }
}

// Sets to -inf the scores of keys that the mask's bits remove. `key`: the tile's first.
template <class T>
__device__ __forceinline__ void RemoveKeys(const Attention& a, const BlockWork& work, int key,
                                           Scores<T>& s) {
  const BiasView& mask = a.bias;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = RowOf<T>(work, r);
    if (row >= work.q_len) continue;
    const int64_t at = work.b * mask.stride_b + work.h * mask.stride_h + row * mask.stride_q;
    const uint8_t* const bits = static_cast<const uint8_t*>(mask.data) + (at + key) / 8;
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
      const uint32_t pair = key + 8 * n < work.k_len ? bits[n] >> KeyOfLane() : 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((pair >> e & 1) == 0) s[r / 2][n][r % 2 * 2 + e] = -INFINITY;
      }
    }
  }
}

// The score terms in the order of problem.h, then a mask of bits.
template <class T>
__device__ __forceinline__ void ApplyTerms(const Attention& a, const BlockWork& work, int key,
                                           Scores<T>& s) {
  const Problem& p = a.problem;
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] *= p.scale;
    }
  }
  CapScores(CapOf(p), s);
  if (p.has_bias && !HasBits(a)) AddBias<T>(a, work, key, s);
  if (p.has_alibi) AddAlibi<T>(a, work, key, s);
  if (HasBits(a)) RemoveKeys<T>(a, work, key, s);
}

// Mask of the thread's keys at or after `end`, which is counted from its first key: the thread's
// keys 8 * n and 8 * n + 1 are bits 2 * n and 2 * n + 1.
__device__ __forceinline__ uint32_t KeysFrom(int end) {
  const int position = max(end, 0);
  return __funnelshift_lc(0u, ~0u, position / 8 * 2 + min(position % 8, 2));
}

// Sets to -inf the scores of keys that a row does not see.
template <class T>
__device__ __forceinline__ void HideKeys(const BlockWork& work, int key, Scores<T>& s) {
  static_assert(2 * T::kKeyBlocks <= 32);
  const int first = key + KeyOfLane();
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    const int row = RowOf<T>(work, r);
    const uint32_t hidden = ~KeysFrom(row + work.begin_shift - first) |
                            KeysFrom(min(row + work.end_shift, work.k_len) - first);
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (hidden & 1u << (2 * n + e)) s[r / 2][n][r % 2 * 2 + e] = NegativeInfinity();
      }
    }
  }
}

// ---- online softmax -----------------------------------------------------------------------------

// Per row, the largest of the thread's own scores.
template <class T>
__device__ __forceinline__ void LocalMaxima(const Scores<T>& s, float (&largest)[T::kThreadRows]) {
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    largest[r] = NegativeInfinity();
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
      const float* pair = &s[r / 2][n][r % 2 * 2];
      largest[r] = fmaxf(largest[r], fmaxf(pair[0], pair[1]));
    }
  }
}

// False only if no score of the thread outgrows its row's base. Compares as integers, of which one
// instruction takes the maximum of three: non-negative floats order like integers, negative ones
// are below 0. max(0, scores) is at least the largest score, and gives a false "may" only if the
// base is below -kBaseSlack, which includes rows before their first key and far rows. NaN compares
// as some number; its row becomes NaN whatever is subtracted.
template <class T>
__device__ __forceinline__ bool MayOutgrow(float to_log2, const Scores<T>& s,
                                           const RowState<T>& state) {
  bool may = false;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    int largest = 0;
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
      const float* pair = &s[r / 2][n][r % 2 * 2];
      largest = __vimax3_s32(largest, __float_as_int(pair[0]), __float_as_int(pair[1]));
    }
    may |= Outgrows(__int_as_float(largest), state.base[r], to_log2);
  }
  return may;
}

// Reference of the thread's row `r`, if it is far (exponent_base.cuh). In shared memory, as far
// rows are rare and registers scarce. A row's four lanes write the same value, and each reads what
// it wrote.
template <class T>
__device__ __forceinline__ float& Reference(int r) {
  __shared__ float references[T::kRows];
  const int thread = ThreadIndex();
  return references[thread / 32 * T::kWarpRows + r / 2 * 16 + r % 2 * 8 + thread % 32 / 4];
}

template <class T>
__device__ __forceinline__ void RescaleRow(float rescale, int r, RowState<T>& state) {
  state.sum[r] *= rescale;
#pragma unroll
  for (int j = 0; j < T::kDim / 8; ++j) {
    state.output[r / 2][j][r % 2 * 2] *= rescale;
    state.output[r / 2][j][r % 2 * 2 + 1] *= rescale;
  }
}

// Plain kernels: raises the base of the thread's row `r` if `top`, its largest score, requires it.
template <class T>
__device__ __forceinline__ void FollowNear(float to_log2, float top, int r, RowState<T>& state) {
  const float base =
      RaisesSm80(top, state.base[r], to_log2) ? NearOrMarkedBase(top, to_log2) : state.base[r];
  RescaleRow<T>(base == state.base[r] ? 1.0f : FastExp2(state.base[r] - base), r, state);
  state.base[r] = base;
}

// General kernels, where a mask alone can make a row far: also subtracts the reference from a far
// row's scores.
template <class T>
__device__ __forceinline__ void FollowFar(float to_log2, float top, int r, Scores<T>& s,
                                          RowState<T>& state) {
  float reference = IsFar(state.base[r]) ? Reference<T>(r) : 0.0f;
  __syncwarp();  // no lane may overwrite it before all have read it
  if (RaisesSm80(top, state.base[r], reference, to_log2)) {
    const RaisedBase raised = RaiseBase(top, state.base[r], reference, to_log2);
    state.base[r] = raised.base;
    RescaleRow<T>(raised.rescale, r, state);
    reference = raised.reference;
    if (IsFar(raised.base)) Reference<T>(r) = reference;
  }
  if (!IsFar(state.base[r])) return;
#pragma unroll
  for (int n = 0; n < T::kKeyBlocks; ++n) {
    float* pair = &s[r / 2][n][r % 2 * 2];
    pair[0] = FarScore(pair[0], reference);
    pair[1] = FarScore(pair[1], reference);
  }
}

// Raises the bases of rows that have outgrown theirs. No row affects another's bits.
template <class T, bool kGeneral>
__device__ __forceinline__ void RaiseBases(float to_log2, Scores<T>& s, RowState<T>& state) {
  if (!__any_sync(0xffffffffu, MayOutgrow<T>(to_log2, s, state))) return;
  float largest[T::kThreadRows];
  LocalMaxima<T>(s, largest);
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    // Far rows always need their scores adjusted.
    outgrown |=
        (kGeneral && IsFar(state.base[r])) || RaisesSm80(largest[r], state.base[r], to_log2);
  }
  if (!__any_sync(0xffffffffu, outgrown)) return;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    float top = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    if constexpr (kGeneral) {
      FollowFar<T>(to_log2, top, r, s, state);
    } else {
      FollowNear<T>(to_log2, top, r, state);
    }
  }
}

// Turns one slice's scores of eight keys into weights, packed as two pairs.
template <class T, class Element>
__device__ __forceinline__ void WeighBlock(float to_log2, int m, float (&s)[4], uint32_t (&p)[2],
                                           RowState<T>& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = 2 * m + half;
    const float low = Weight(s[2 * half], to_log2, state.base[r]);
    const float high = Weight(s[2 * half + 1], to_log2, state.base[r]);
    state.sum[r] += low + high;
    p[half] = Pack<Element>(low, high);
  }
}

}  // namespace attend::cuda::sm80
