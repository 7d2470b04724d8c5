// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, producer: one warp keeps the copy engine ahead of the consumers. Key tiles go
// from last to first, so that masked tiles come first; V follows one tile behind K, in the
// consumers' order.

#pragma once

#include "kernels/cuda/sm90/mask_bits.cuh"
#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

// kPaged: K and V are paged.
template <class T, bool kPaged>
struct Producer {
  char* shared;
  const Sm90SharedStorage<T> storage;
  const int lane;
  PackedCursor<T::kStages> k = {}, v = {};
  PackedCursor<T::kStagesQ> q = {};
  PackedCursor<kSm90Scans> scan = {};  // if T has a mask of bits
  uint32_t tail_parity = 0;

  // Announces the tile's bytes, `row_bytes` per row, and calls load(row of the tile, row, batch)
  // for each of its boxes, the latter two in the tensor map's coordinates. In pages, each box is in
  // one page, and only boxes with keys of the sequence are loaded. The rest of the stage keeps its
  // old contents: those weights are 0, and LoadLastV clears the values. Lane n looks up the page of
  // box n before waiting for the stage, which hides the latency.
  template <class Load>
  __device__ __forceinline__ void ForBoxes(const Sm90Work& at, int tile, int batch, uint32_t empty,
                                           uint32_t parity, uint32_t full, int row_bytes,
                                           const Load& load) {
    const int first = tile * T::kKeys;
    if constexpr (!kPaged) {
      if (lane != 0) return;
      Wait(empty, parity);
      ArriveExpecting(full, T::kKeys * row_bytes);
      load(0, at.k_row + first, batch);
      return;
    }
    const int shift = at.page_shift;
    const int box_rows = PageBoxRows(1 << shift, T::kKeys);
    const int rows = min(at.window.k_len - first, T::kKeys);
    const int mine = lane * box_rows;
    int page = 0;
    if (mine < rows) {
      const PageTable& table = at.attention->kv_pages;
      page = table.pages[at.o_batch * table.stride + ((first + mine) >> shift)];
    }
    if (lane == 0) {
      Wait(empty, parity);
      ArriveExpecting(full, ((rows + box_rows - 1) & -box_rows) * row_bytes);
    }
#pragma unroll 1
    for (int n = 0, row = 0; row < rows; ++n, row += box_rows) {
      const int number = __shfl_sync(0xffffffffu, page, n);
      if (lane == 0) load(row, (first + row) & ((1 << shift) - 1), number);
    }
  }

  __device__ __forceinline__ void LoadK(const Sm90Work& at, int tile) {
    const uint32_t full = storage.FullK(k.stage());
    ForBoxes(at, tile, at.k_batch, storage.EmptyK(k.stage()), k.parity() ^ 1, full, 2 * T::kD,
             [&](int at_row, int row, int batch) {
               const uint32_t to = storage.K(k.stage()) + at_row * 2 * T::kCols;
#pragma unroll
               for (int n = 0; n < T::kBoxesQK; ++n) {
                 LoadBox(&at.maps->k, to + n * T::kBoxBytesK, full, n * T::kCols, row, at.k_head,
                         batch, CachePolicy::kEvictLast);
               }
             });
    k.Step();
  }

  __device__ __forceinline__ void CopyV(const Sm90Work& at, int tile, uint32_t full) {
    ForBoxes(at, tile, at.v_batch, storage.EmptyV(v.stage()), v.parity() ^ 1, full, 2 * T::kDv,
             [&](int at_row, int row, int batch) {
               const uint32_t to = storage.V(v.stage()) + at_row * 2 * T::kColsV;
#pragma unroll
               for (int n = 0; n < T::kBoxesV; ++n) {
                 LoadBox(&at.maps->v, to + n * T::kBoxBytesV, full, n * T::kColsV, row, at.v_head,
                         batch, CachePolicy::kEvictLast);
               }
             });
  }

  __device__ __forceinline__ void LoadV(const Sm90Work& at, int tile) {
    CopyV(at, tile, storage.FullV(v.stage()));
    v.Step();
  }

  // A tile that extends beyond the length, into another sequence's rows or padding: their weights
  // are 0, but 0 * NaN is NaN, so these rows are cleared after loading.
  __device__ __forceinline__ void LoadLastV(const Sm90Work& at, int tile) {
    CopyV(at, tile, storage.Tail());
    Wait(storage.Tail(), tail_parity);
    tail_parity ^= 1;
    constexpr int kRowBytes = 2 * T::kColsV;
    const int begin = (at.window.k_len - tile * T::kKeys) * kRowBytes;
    char* tile_data = shared + T::kOffsetV + v.stage() * T::kBytesV;
#pragma unroll 1
    for (int n = 0; n < T::kBoxesV; ++n) {
#pragma unroll 1
      for (int byte = begin + 16 * lane; byte < T::kBoxBytesV; byte += 16 * 32) {
        *reinterpret_cast<int4*>(tile_data + n * T::kBoxBytesV + byte) = make_int4(0, 0, 0, 0);
      }
    }
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(storage.FullV(v.stage()));
    v.Step();
  }

  // Lets the consumers read the tile's description, and loads Q.
  __device__ __forceinline__ void Publish(const Sm90Work& at) {
    if (lane == 0) {
      const uint32_t full = storage.FullQ(q.stage());
      Wait(storage.EmptyQ(q.stage()), q.parity() ^ 1);
      if (at.tile_begin < at.tile_end) {
        ArriveExpecting(full, T::kBytesQ);
#pragma unroll
        for (int n = 0; n < T::kBoxesQK; ++n) {
          LoadBox(&at.maps->q, storage.Q(q.stage()) + n * T::kBoxBytesQ, full, n * T::kCols,
                  at.q_row + at.row_begin, at.q_head, at.q_batch, CachePolicy::kEvictFirst);
        }
      } else {
        Arrive(full);
      }
    }
    q.Step();
  }

  // A list's maps overwrite those of the last launch in place, so acquire them. The storing threads
  // acquire O's.
  __device__ __forceinline__ void Acquire(const Sm90Work& at) {
    if (lane != 0 || !at.new_maps) return;
    AcquireTensorMap(&at.maps->q);
    AcquireTensorMap(&at.maps->k);
    AcquireTensorMap(&at.maps->v);
  }

  __device__ __forceinline__ void LoadV(const Sm90Work& at, int tile, bool patch) {
    if (patch) {
      LoadLastV(at, tile);
    } else {
      LoadV(at, tile);
    }
  }

  // Waits for the next stage of K, and writes its entry for the consumers.
  __device__ __forceinline__ void Announce(int entry) {
    if (lane != 0) return;
    Wait(storage.EmptyK(k.stage()), k.parity() ^ 1);
    auto& state = *reinterpret_cast<Sm90State<T>*>(shared + T::kOffsetState);
    state.bits.entries[k.stage()] = entry;
  }

  // With a mask of bits: loads the tiles in which some row sees a key, then an end entry.
  __device__ __forceinline__ void RunSeenTiles(const Sm90Work& at) {
    const auto& state = *reinterpret_cast<const Sm90State<T>*>(shared + T::kOffsetState);
    const int patched = at.patch ? at.tile_end - 1 : -1;
    int held = -1;  // tile whose V is still to be loaded
    Acquire(at);
    __syncwarp();
    ForSeenTiles(storage, state, at, scan, [&](int tile, bool all_seen) {
      Announce(MaskBits<T>::EntryOf(tile, all_seen));
      LoadK(at, tile);
      if (held < 0) {
        Publish(at);
      } else {
        LoadV(at, held, held == patched);
      }
      held = tile;
    });
    if (held < 0) {
      Publish(at);
    } else {
      LoadV(at, held, held == patched);
    }
    Announce(MaskBits<T>::kEndEntry);
    if (lane == 0) Arrive(storage.FullK(k.stage()));
    k.Step();
  }

  __device__ __forceinline__ void RunTile(const Sm90Work& at) {
    const int begin = at.tile_begin;
    const int last = at.tile_end - 1;
    const bool patch = at.patch;
    Acquire(at);
    __syncwarp();  // once Q is published, consumers may free the description
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
    for (PackedCursor<Sm90State<T>::kSlots> slot;; slot.Step()) {
      Wait(storage.FullWork(slot.stage()), slot.parity());
      const Sm90Work& at = state.work[slot.stage()];
      if (at.end) {
        Publish(at);
        return;
      }
      if constexpr (T::kBits) {
        RunSeenTiles(at);
      } else {
        RunTile(at);
      }
    }
  }
};

}  // namespace attend::cuda
