// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80, setup of a tile: its keys, and the addresses of its rows of Q, K, V, O and LSE.
// Device code; one thread of a block calls each function, while the other threads' copies are in
// flight.

#pragma once

#include <cstdint>

#include "kernels/contract/limits.h"
#include "kernels/cuda/ragged/tile_queue.cuh"
#include "kernels/cuda/sm80/softmax.cuh"

namespace attend::cuda::sm80 {

// The keys that the block's rows see.
template <class T>
__device__ __forceinline__ void SetKeys(const Mask& mask, const Sequence& s, BlockWork& work) {
  if (mask.unrestricted()) {  // shortcut for the general case below
    work.begin_shift = -static_cast<int>(kLengthMax);
    work.end_shift = static_cast<int>(kLengthMax);
    work.key_begin = work.full_begin = 0;
    work.key_end = work.full_end = work.row_begin < work.q_len ? work.k_len : 0;
    return;
  }
  // Clamp to the longest sequence, which restricts nothing and cannot overflow.
  const int64_t left = mask.left < 0 ? 2 * kLengthMax : min(mask.left, 2 * kLengthMax);
  const int64_t right = mask.right < 0 ? 2 * kLengthMax : min(mask.right, 2 * kLengthMax);
  work.begin_shift = static_cast<int>(max(s.offset - left, -kLengthMax));
  work.end_shift = static_cast<int>(min(s.offset + right + 1, kLengthMax));
  work.key_begin = work.key_end = work.full_begin = work.full_end = 0;
  const int64_t row_last = min(int64_t{work.row_begin} + T::kRows, s.q_len) - 1;
  if (row_last < work.row_begin) return;
  // Both ends of the visible range are monotonic in the row.
  const KeyRange first = VisibleKeys(mask, s, work.row_begin);
  const KeyRange last = VisibleKeys(mask, s, row_last);
  const int64_t begin = min(first.begin, s.k_len);
  work.key_begin = static_cast<int>(begin - begin % T::kKeys);
  work.key_end = static_cast<int>(max(last.end, int64_t{0}));
  work.full_begin = static_cast<int>(min(last.begin, s.k_len));
  work.full_end = static_cast<int>(max(first.end, int64_t{0}));
}

// Addresses of the tile's rows of O and LSE.
__device__ __forceinline__ void SetOutput(const Attention& a, const Sequence& s, BlockWork& work) {
  const Problem& p = a.problem;
  work.o_float32 = p.o_float32;
  const int64_t size = p.o_float32 ? 4 : 2;
  work.o = static_cast<char*>(a.o.data) +
           size * (work.b * a.o.stride_b + work.h * a.o.stride_h + s.q_row * a.o.stride_l);
  work.o_stride = size * a.o.stride_l;
  work.o_fast =
      ((reinterpret_cast<uint64_t>(work.o) | work.o_stride) & 15) == 0 && p.dim_v % 8 == 0;
  work.lse =
      p.return_lse ? a.lse + work.b * a.lse_stride_b + work.h * a.lse_stride_h + s.q_row : nullptr;
  work.has_sink = p.has_sinks;
  work.sink = p.has_sinks ? a.sinks[work.h] : 0.0f;
}

// Addresses of paged keys.
__device__ __forceinline__ void SetPages(const Attention& a, int b, int kv_head, BlockWork& work) {
  const Problem& p = a.problem;
  work.pages.numbers = a.kv_pages.pages + b * a.kv_pages.stride;
  work.pages.shift = __ffsll(p.page_rows) - 1;
  work.pages.stride_k = 2 * a.k.stride_b;
  work.pages.stride_v = 2 * a.v.stride_b;
  work.k = SourceOf(a.k, 0, kv_head, 0, p.dim);
  work.v = SourceOf(a.v, 0, kv_head, 0, p.dim_v);
  work.k.fast &= work.pages.stride_k % 16 == 0;
  work.v.fast &= work.pages.stride_v % 16 == 0;
}

template <class T, bool kGeneral>
__device__ __forceinline__ void Describe(const Attention& a, const TileWork& found, int tile,
                                         BlockWork& work) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, found.b);
  const int group = Divide(static_cast<int>(p.heads_q), static_cast<int>(p.heads_kv)).whole;
  const int kv_head = Divide(found.h, group).whole;
  work.attention = &a;
  work.q = SourceOf(a.q, found.b, found.h, s.q_row, p.dim);
  work.k = SourceOf(a.k, found.b, kv_head, s.k_row, p.dim);
  work.v = SourceOf(a.v, found.b, kv_head, s.k_row, p.dim_v);
  if constexpr (T::kPaged) SetPages(a, found.b, kv_head, work);
  work.b = found.b;
  work.h = found.h;
  work.row_begin = found.row_begin;
  work.q_len = static_cast<int>(s.q_len);
  work.q_rows = static_cast<int>(s.q_rows);
  work.k_len = static_cast<int>(s.k_len);
  work.offset = static_cast<int>(s.offset);
  work.spoiled[0] = work.spoiled[1] = -1;
  work.asked = 0;
  work.has_bias = p.has_bias;
  work.warp_flip = tile % 2 == 0 ? 0 : T::kWarps - 1;
  SetKeys<T>(p.mask, s, work);
  SetOutput(a, s, work);
  // Plain kernels keep raw q.k. The online softmax needs the largest score, so Q gets the scale's
  // sign.
  work.query_sign = kGeneral || p.scale > 0.0f ? 1.0f : -1.0f;
  work.to_log2 = kGeneral ? kLog2E : __fmul_rn(fabsf(p.scale), kLog2E);
}

// Describes tile number `tile`. One thread of the block. An attention passed in the kernel's
// parameter is read there, without indirection.
template <class T, bool kGeneral>
__device__ __forceinline__ void SetUp(const RaggedParams& params, int tile, BlockWork& work) {
  TileWork found;
  work.attention = nullptr;
  if (params.attentions == nullptr) {
    if (!FindTile<true>(params, tile, T::kRows, found)) return;
    Describe<T, kGeneral>(params.single, found, tile, work);
  } else if (FindTile<false>(params, tile, T::kRows, found)) {
    Describe<T, kGeneral>(*found.attention, found, tile, work);
  }
}

}  // namespace attend::cuda::sm80
