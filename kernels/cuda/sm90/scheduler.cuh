// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, scheduler: one thread claims tiles of query rows and computes their descriptions
// for producer and consumers, one tile ahead.

#pragma once

#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

// A window bound in 32 bits; -1 (unbounded) if it does not fit, as it then hides no key.
__device__ __forceinline__ int Bound(int64_t distance) {
  return distance > INT32_MAX ? -1 : static_cast<int>(distance);
}

// Lengths, window, and the key tiles that rows [row_begin, row_begin + kRows) see.
template <class T>
__device__ __forceinline__ void DescribeKeys(const Attention& a, const TileWork& tile,
                                             Sm90Work& work) {
  const Problem& p = a.problem;
  int q_len = static_cast<int>(p.len_q);
  int k_len = static_cast<int>(p.len_k);
  work.q_rows = q_len;
  work.q_row = work.k_row = 0;
  if (p.packed) {
    work.q_row = static_cast<int>(a.q_offsets[tile.b]);
    work.k_row = static_cast<int>(a.kv_offsets[tile.b]);
    q_len = static_cast<int>(a.q_offsets[tile.b + 1]) - work.q_row;
    k_len = static_cast<int>(a.kv_offsets[tile.b + 1]) - work.k_row;
    work.q_rows = q_len;
  } else {
    if (a.q_lengths != nullptr) q_len = static_cast<int>(a.q_lengths[tile.b]);
    if (a.kv_lengths != nullptr) k_len = static_cast<int>(a.kv_lengths[tile.b]);
  }
  work.row_begin = tile.row_begin;
  work.q_len = q_len;
  Window window;
  window.left = Bound(p.mask.left);
  window.right = Bound(p.mask.right);
  window.k_len = k_len;
  // DiagonalOffset, by multiplication instead of a branch, which fits this warp's few registers.
  const int bottom = p.mask.alignment == Alignment::kBottomRight;
  window.offset = bottom * (k_len + static_cast<int>(p.keys_after) - q_len) -
                  (1 - bottom) * static_cast<int>(p.key_offset);
  work.window = window;
  work.tile_begin = work.tile_end = 0;
  work.patch = false;
  const int row_last = min(tile.row_begin + T::kRows, q_len) - 1;
  if (row_last < tile.row_begin) return;
  // Both ends of the visible range are monotonic in the row.
  const int begin = window.Begin(tile.row_begin);
  const int end = window.End(row_last);
  if (begin >= end) return;
  work.tile_begin = begin / T::kKeys;
  work.tile_end = (end + T::kKeys - 1) / T::kKeys;
  work.patch =
      work.tile_end * T::kKeys > k_len && (p.packed || a.kv_lengths != nullptr || p.page_rows > 0);
}

// Coordinates of Q, K and V in their tensors, and addresses of O and LSE.
template <class T>
__device__ __forceinline__ void DescribeMemory(const Attention& a, const TileWork& tile,
                                               Sm90Work& work) {
  const Problem& p = a.problem;
  const int batch = p.packed ? 0 : tile.b;
  const int kv_head = tile.h / static_cast<int>(p.group());
  work.page_shift = max(__ffs(static_cast<int>(p.page_rows)) - 1, 0);
  work.q_head = BroadcastIndex(a.q.stride_h, tile.h);
  work.q_batch = BroadcastIndex(a.q.stride_b, batch);
  work.k_head = BroadcastIndex(a.k.stride_h, kv_head);
  work.k_batch = BroadcastIndex(a.k.stride_b, batch);
  work.v_head = BroadcastIndex(a.v.stride_h, kv_head);
  work.v_batch = BroadcastIndex(a.v.stride_b, batch);
  work.dim_v = static_cast<int>(p.dim_v);
  work.o = static_cast<uint16_t*>(a.o.data) + batch * a.o.stride_b + tile.h * a.o.stride_h +
           work.q_row * a.o.stride_l;
  work.o_stride = a.o.stride_l;
  work.vectors =
      reinterpret_cast<uint64_t>(work.o) % 16 == 0 && work.o_stride % 8 == 0 && work.dim_v % 8 == 0;
  work.o_head = tile.h;
  work.o_batch = tile.b;
  work.lse = p.return_lse ? a.lse + batch * a.lse_stride_b + tile.h * a.lse_stride_h + work.q_row
                          : nullptr;
}

template <class T>
__device__ __forceinline__ void DescribeTile(const Attention& a, const TileWork& tile,
                                             Sm90Work& work) {
  const Problem& p = a.problem;
  work.end = false;
  work.attention = &a;
  DescribeKeys<T>(a, tile, work);
  DescribeMemory<T>(a, tile, work);
  work.has_sink = p.has_sinks;
  work.sink = p.has_sinks ? a.sinks[tile.h] : 0.0f;
  work.to_log2 = (p.softcap > 0.0f ? p.softcap : p.scale) * kLog2E;
  work.cap_factor = CapFactor(p);
}

// Address of the mask's bits for the tile's head.
__device__ __forceinline__ void DescribeBits(const Attention& a, const TileWork& tile,
                                             BitRows& rows) {
  const BiasView& mask = a.bias;
  rows.data = static_cast<const uint8_t*>(mask.data) +
              (tile.b * mask.stride_b + tile.h * mask.stride_h) / 8;
  rows.stride = mask.stride_q / 8;
  rows.row_bytes = static_cast<int>((a.problem.len_k + 7) / 8);
}

template <class T>
struct Scheduler {
  const RaggedParams& params;
  Sm90State<T>& state;
  const Sm90SharedStorage<T> storage;
  StageCursor<Sm90State<T>::kSlots> slot = {};
  int32_t last_problem = -1;

  // kSingle: the attention is the kernel's parameter itself, without indirection.
  template <bool kSingle>
  __device__ __forceinline__ bool Describe(int number) {
    TileWork tile;
    Sm90Work& work = state.work[slot.stage()];
    const bool found = FindTile<kSingle>(params, number, T::kRows, tile);
    Wait(storage.EmptyWork(slot.stage()), slot.parity() ^ 1);
    if (!found) {
      work.end = true;
      work.tile_begin = work.tile_end = 0;
    } else if constexpr (kSingle) {
      work.maps = &params.single_maps;
      work.new_maps = false;
      DescribeTile<T>(params.single, tile, work);
      if constexpr (T::kBits) DescribeBits(params.single, tile, state.bits.rows[slot.stage()]);
    } else {
      work.maps = params.maps + tile.problem;
      work.new_maps = tile.problem != last_problem;
      last_problem = tile.problem;
      const Attention& attention = params.attentions[tile.problem];
      DescribeTile<T>(attention, tile, work);
      if constexpr (T::kBits) DescribeBits(attention, tile, state.bits.rows[slot.stage()]);
    }
    Arrive(storage.FullWork(slot.stage()));
    slot.Step();
    return found;
  }

  // The launch may start before the previous one has ended. A first tile that needs only the
  // parameter is described during that time (the producer also waits before it loads); memory that
  // earlier launches may write, including the queue, is not touched before the wait.
  template <bool kSingle>
  __device__ __forceinline__ void DescribeAll() {
    const bool known = kSingle && !params.single.problem.has_sinks;
    if (!known) AwaitEarlierLaunches();
    bool more = Describe<kSingle>(static_cast<int>(blockIdx.x));
    if (known) AwaitEarlierLaunches();
    while (more) more = Describe<kSingle>(ClaimTile(params));
  }

  __device__ __forceinline__ void Run() {
    if (params.attentions == nullptr) {
      DescribeAll<true>();
    } else {
      DescribeAll<false>();
    }
    LeaveQueue(params);
  }
};

}  // namespace attend::cuda
