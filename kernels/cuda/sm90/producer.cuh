// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, producer: one warp keeps the copy engine ahead of the consumers. Keys are walked
// from the last tile to the first, so that masked tiles come first; V comes one tile after K, as
// the consumers use them.

#pragma once

#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

template <class T>
struct Producer {
  char* shared;
  const Sm90SharedStorage<T> storage;
  const int lane;
  StageCursor<T::kStages> k = {}, v = {};
  StageCursor<T::kStagesQ> q = {};
  uint32_t tail_parity = 0;

  __device__ __forceinline__ void LoadK(const Sm90Work& at, int tile) {
    if (lane == 0) {
      Wait(storage.EmptyK(k.stage), k.parity ^ 1);
      const uint32_t full = storage.FullK(k.stage);
      ArriveExpecting(full, T::kBytesK);
#pragma unroll
      for (int n = 0; n < T::kBoxesQK; ++n) {
        LoadBox(&at.maps->k, storage.K(k.stage) + n * T::kBoxBytesK, full, n * T::kCols,
                at.k_row + tile * T::kKeys, at.k_head, at.k_batch, CachePolicy::kEvictLast);
      }
    }
    k.Step();
  }

  __device__ __forceinline__ void CopyV(const Sm90Work& at, int tile, uint32_t full) {
    Wait(storage.EmptyV(v.stage), v.parity ^ 1);
    ArriveExpecting(full, T::kBytesV);
#pragma unroll
    for (int n = 0; n < T::kBoxesV; ++n) {
      LoadBox(&at.maps->v, storage.V(v.stage) + n * T::kBoxBytesV, full, n * T::kColsV,
              at.k_row + tile * T::kKeys, at.v_head, at.v_batch, CachePolicy::kEvictLast);
    }
  }

  __device__ __forceinline__ void LoadV(const Sm90Work& at, int tile) {
    if (lane == 0) CopyV(at, tile, storage.FullV(v.stage));
    v.Step();
  }

  // A tile that ends beyond the length, where rows are another sequence's or padding: the weights
  // there are 0, but 0 * NaN is NaN, so what was loaded of these rows must go.
  __device__ __forceinline__ void LoadLastV(const Sm90Work& at, int tile) {
    if (lane == 0) CopyV(at, tile, storage.Tail());
    Wait(storage.Tail(), tail_parity);
    tail_parity ^= 1;
    constexpr int kRowBytes = 2 * T::kColsV;
    const int begin = (at.window.k_len - tile * T::kKeys) * kRowBytes;
    char* tile_data = shared + T::kOffsetV + v.stage * T::kBytesV;
#pragma unroll 1
    for (int n = 0; n < T::kBoxesV; ++n) {
#pragma unroll 1
      for (int byte = begin + 16 * lane; byte < T::kBoxBytesV; byte += 16 * 32) {
        *reinterpret_cast<int4*>(tile_data + n * T::kBoxBytesV + byte) = make_int4(0, 0, 0, 0);
      }
    }
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(storage.FullV(v.stage));
    v.Step();
  }

  // Lets the consumers read what was written of the tile, and loads Q.
  __device__ __forceinline__ void Publish(const Sm90Work& at) {
    if (lane == 0) {
      const uint32_t full = storage.FullQ(q.stage);
      Wait(storage.EmptyQ(q.stage), q.parity ^ 1);
      if (at.tile_begin < at.tile_end) {
        ArriveExpecting(full, T::kBytesQ);
#pragma unroll
        for (int n = 0; n < T::kBoxesQK; ++n) {
          LoadBox(&at.maps->q, storage.Q(q.stage) + n * T::kBoxBytesQ, full, n * T::kCols,
                  at.q_row + at.row_begin, at.q_head, at.q_batch, CachePolicy::kEvictFirst);
        }
      } else {
        Arrive(full);
      }
    }
    q.Step();
  }

  // The maps of a list are where those of the last launch were.
  __device__ __forceinline__ void Acquire(const Sm90Work& at) {
    if (lane != 0 || !at.new_maps) return;
    AcquireTensorMap(&at.maps->q);
    AcquireTensorMap(&at.maps->k);
    AcquireTensorMap(&at.maps->v);
    AcquireTensorMap(&at.maps->o);
  }

  __device__ __forceinline__ void RunTile(const Sm90Work& at) {
    const int begin = at.tile_begin;
    const int last = at.tile_end - 1;
    const bool patch = at.patch;
    __syncwarp();  // once Q is published, consumers may free the description
    Acquire(at);
    if (begin <= last) LoadK(at, last);
    Publish(at);
    for (int n = last; n >= begin; --n) {
      if (n > begin) LoadK(at, n - 1);
      if (n == last && patch) {
        LoadLastV(at, n);
      } else {
        LoadV(at, n);
      }
    }
  }

  __device__ __forceinline__ void Run() {
    const auto& state = *reinterpret_cast<const Sm90State<T>*>(shared + T::kOffsetState);
    AwaitEarlierLaunches();
    for (StageCursor<Sm90State<T>::kSlots> slot;; slot.Step()) {
      Wait(storage.FullWork(slot.stage), slot.parity);
      const Sm90Work& at = state.work[slot.stage];
      if (at.end) {
        Publish(at);
        return;
      }
      RunTile(at);
    }
  }
};

}  // namespace attend::cuda
