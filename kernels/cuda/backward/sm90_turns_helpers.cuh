// SPDX-License-Identifier: Apache-2.0
//
// TurnsSm90's helper warps: one takes works, one loads their tiles, and two add to dQ in turn.

#pragma once

#include "kernels/cuda/backward/sm90_turns_tile.cuh"

namespace attend::cuda::backward {

// Read again whenever it is needed, as registers are few.
__device__ __forceinline__ int Lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

template <class T, class List>
struct TurnsProducer {
  const List& list;
  const TurnsPlace& place;
  const TurnsWork& work;
  const TurnsShared<T> shared;
  uint32_t& tail_parity;  // in shared memory

  // Found again whenever it is needed, as registers are few.
  __device__ __forceinline__ const Sm90Params& Params() const { return place.Item(list); }

  // The nth head of the group.
  __device__ __forceinline__ int Head(int n) const {
    return static_cast<int>(work.kv_head) * Params().group + n;
  }
  __device__ __forceinline__ int Term(int n, int row) const {
    return work.term + n * work.head_terms + row;
  }

  // Loads a tile of kCount rows, from `row` of the tensor on.
  template <int kCount>
  __device__ __forceinline__ void LoadBoxes(const CUtensorMap* map, const ConstTensorView& view,
                                            uint32_t to, uint32_t barrier, int head, int row,
                                            CachePolicy policy) const {
    const int64_t b = Params().pass.attention.problem.packed ? 0 : work.b;
#pragma unroll 1
    for (int n = 0; n < T::Rows::kBoxes; ++n) {
      LoadBox(map, to + n * kCount * kRowBytes, barrier, n * kCols, row,
              BroadcastIndex(view.stride_h, head), BroadcastIndex(view.stride_b, b), policy);
    }
  }

  // Zeroes the tile from `begin` on, and signals `full`. `terms`: its rows', or 0.
  template <int kCount>
  __device__ __forceinline__ void Patch(uint32_t tile, int begin, uint32_t full, uint32_t terms = 0,
                                        float term = 0.0f) const {
    Wait(shared.Tail(), tail_parity);
    __syncwarp();
    if (Lane() == 0) tail_parity ^= 1;
    PatchRows<kCount, T::kD>(tile, max(begin, 0), Lane());
    if (terms != 0) PatchTerms(terms, max(begin, 0), kCount, term, Lane());
    FenceAsyncProxy();
    __syncwarp();
    if (Lane() == 0) Arrive(full);
  }

  // Loads a tile of Q or dO with its rows' terms. Rows beyond the length, which may be another
  // sequence's or have any contents, become zeros with neutral terms if they might not be finite.
  template <bool kIsQ>
  __device__ __forceinline__ void LoadRows(int stage, int n, int row) const {
    constexpr int kBytes = T::kTermBytes / 3;
    const Attention& a = Params().pass.attention;
    const uint32_t to = kIsQ ? shared.Q(stage) : shared.O(stage);
    const uint32_t full = kIsQ ? shared.FullQ(stage) : shared.FullO(stage);
    const uint32_t terms = shared.Terms(stage) + (kIsQ ? 0 : kBytes);
    const bool patch = row + T::kRows > work.band.q_len &&
                       (work.special || a.problem.packed || a.q_lengths != nullptr);
    if (Lane() == 0) {
      const Sm90Params& params = Params();
      const BackwardPass& pass = params.pass;
      const bool shifted = kIsQ && work.shifted;
      const uint32_t barrier = patch ? shared.Tail() : full;
      ArriveExpecting(barrier, T::Rows::kBytes + kBytes * (shifted ? 2 : 1));
      LoadFloats((kIsQ ? pass.lse : pass.less) + Term(n, row), terms, T::kRows, barrier);
      if (shifted) LoadFloats(pass.shift + Term(n, row), terms + 2 * kBytes, T::kRows, barrier);
      LoadBoxes<T::kRows>(kIsQ ? &params.maps.q : &params.maps.o,
                          kIsQ ? pass.attention.q : pass.gradients.d_o, to, barrier, Head(n),
                          static_cast<int>(work.s.q_row) + row, CachePolicy::kEvictLast);
    }
    if (patch) {
      Patch<T::kRows>(to, work.band.q_len - row, full, terms, kIsQ ? INFINITY : 0.0f);
    }
  }

  // Loads the tile of K or V. Keys beyond the length meet weights of 0.
  template <bool kIsK>
  __device__ __forceinline__ void LoadKeys(uint32_t to, uint32_t full) const {
    const Attention& a = Params().pass.attention;
    const bool patch =
        work.key + T::kKeys > work.band.k_len && (a.problem.packed || a.kv_lengths != nullptr);
    if (Lane() == 0) {
      const Sm90Params& params = Params();
      const uint32_t barrier = patch ? shared.Tail() : full;
      ArriveExpecting(barrier, T::Keys::kBytes);
      LoadBoxes<T::kKeys>(kIsK ? &params.maps.k : &params.maps.v,
                          kIsK ? params.pass.attention.k : params.pass.attention.v, to, barrier,
                          static_cast<int>(work.kv_head), static_cast<int>(work.s.k_row) + work.key,
                          CachePolicy::kEvictFirst);
    }
    if (patch) Patch<T::kKeys>(to, work.band.k_len - work.key, full);
  }

  __device__ __forceinline__ void Run() const {
    int n = 0;  // head of the group
    int row = work.row_end - T::kRows;
#pragma unroll 1
    for (int step = place.steps; step < place.next_steps; ++step) {
      const int stage = step % T::kStages;
      const uint32_t parity = step / T::kStages % 2 ^ 1;
      Wait(shared.EmptyQ(stage), parity);
      LoadRows<true>(stage, n, row);
      if (step == place.steps) {
        Wait(shared.EmptyV(), place.loads % 2 ^ 1);
        LoadKeys<false>(shared.V(), shared.FullV());
      }
      Wait(shared.EmptyO(stage), parity);
      LoadRows<false>(stage, n, row);
      if (step == place.steps) {
        // After the rows: the last work holds K for longer.
        const int slot = place.KeySlot<T>();
        Wait(shared.EmptyK(slot), place.KeyParity<T>() ^ 1);
        LoadKeys<true>(shared.K(slot), shared.FullK(slot));
      }
      row -= T::kRows;
      if (row < work.row_begin) {
        row = work.row_end - T::kRows;
        ++n;
      }
    }
  }
};

// Reads a count with acquire semantics: writes published with it are visible.
__device__ __forceinline__ uint32_t ReadCount(const uint32_t* at) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(at) : "memory");
  return count;
}
__device__ __forceinline__ void PublishCount(uint32_t* at, uint32_t count) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(count) : "memory");
}

// Takes the works of a block, none before the last's loads have been issued: others may wait for a
// work that is taken. One thread.
template <class T, class List>
__device__ __forceinline__ void TakeTurns(const List& list, TurnsPlace* places,
                                          const TurnsShared<T>& shared) {
  TurnsPlace* place = &places[kWorks - 1];
  do {
    const TurnsPlace& last = *place;
    place = &places[(last.nth + 1) % kWorks];
    if (last.nth >= 0) Wait(shared.Loaded(), last.nth % 2);
    Wait(shared.EmptyWork((last.nth + 1) % kWorks), (last.nth + 1) / kWorks % 2 ^ 1);
    place->Take<T>(list, last);
    Arrive(shared.FullWork(place->Slot()));
  } while (place->item >= 0);
}

// Loads the tiles of a block's works. A warp.
template <class T, class List>
__device__ __forceinline__ void ProduceTurns(const List& list, const TurnsPlace* places,
                                             const TurnsShared<T>& shared, uint32_t& tail_parity) {
#pragma unroll 1
  for (int nth = 0;;) {
    Wait(shared.FullWork(nth % kWorks), nth / kWorks % 2);
    const TurnsPlace& place = places[nth % kWorks];
    if (place.item < 0) return;
    if (!place.work.Empty()) {
      TurnsProducer<T, List> producer{list, place, place.work, shared, tail_parity};
      producer.Run();
    }
    nth = place.nth + 1;
    __syncwarp();  // `place` may be overwritten once the slot is free
    if (Lane() == 0) {
      Arrive(shared.Loaded());
      Arrive(shared.EmptyWork(place.Slot()));
    }
  }
}

// The copy engine stores or adds floats of shared memory.
__device__ __forceinline__ void StoreFloats(float* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void AddFloats(float* to, uint32_t from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
// Until the thread's copies have read shared memory; until they are done.
__device__ __forceinline__ void WaitForReads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void WaitForWrites() {
  asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
}

// Has the copy engine add a consumer's halves of dQ to the sums when their turns have come, and
// passes each turn to the next block once the additions are visible. One thread.
template <class T>
struct TurnsKeeper {
  const Sm90Params& params;
  const TurnsWork& work;
  const TurnsShared<T> shared;
  const int consumer;

  // A step's half of dQ, and the number of blocks that add to it earlier.
  struct Place {
    int half;
    uint32_t earlier;
  };
  __device__ __forceinline__ Place At(int step) const {
    const int tiles = (work.row_end - work.row_begin) / T::kRows;
    const int head = step / tiles;
    const int row = work.row_end - (step - head * tiles + 1) * T::kRows;
    return {work.half + head * work.head_halves + row / T::kRows * 2 + consumer,
            EarlierBlocks<T>(work.band, row, work.key)};
  }

  // `before`: steps of the block's earlier works.
  __device__ __forceinline__ void Run(int before) {
    constexpr int kBytes = T::kD == 96 ? T::kSumBytes / 2 : T::kSumBytes;
    const int bytes = consumer == 0 ? T::kSumBytes : kBytes;
    const int steps = work.template Steps<T>(params);
    const uint32_t from = shared.Sums(consumer);
    Place place = At(0);
    uint32_t count = ReadCount(params.pass.turns + place.half);
    for (int step = 0; step < steps; ++step) {
      Wait(shared.FullSums(consumer), (before + step) % 2);
      while (count != place.earlier) count = ReadCount(params.pass.turns + place.half);
      float* const to = params.pass.sums + place.half * kTurnHalfFloats;
      if (place.earlier == 0) {
        StoreFloats(to, from, bytes);
      } else {
        AddFloats(to, from, bytes);
      }
      const Place next = step + 1 < steps ? At(step + 1) : place;
      WaitForReads();
      Arrive(shared.EmptySums(consumer));
      WaitForWrites();
      PublishCount(params.pass.turns + place.half, place.earlier + 1);
      count = ReadCount(params.pass.turns + next.half);
      place = next;
    }
  }
};

// Keeps the turns of a block's works. One thread.
template <class T, class List>
__device__ __forceinline__ void KeepTurns(const List& list, const TurnsPlace* places,
                                          const TurnsShared<T>& shared, int consumer) {
#pragma unroll 1
  for (int nth = 0;;) {
    Wait(shared.FullWork(nth % kWorks), nth / kWorks % 2);
    const TurnsPlace& place = places[nth % kWorks];
    if (place.item < 0) return;
    if (!place.work.Empty()) {
      TurnsKeeper<T> keeper{place.Item(list), place.work, shared, consumer};
      keeper.Run(place.steps);
    }
    nth = place.nth + 1;
    Arrive(shared.EmptyWork(place.Slot()));
  }
}

}  // namespace attend::cuda::backward
