// SPDX-License-Identifier: Apache-2.0
//
// TurnsSm90's helper warps: one loads tiles, others give consumers their turns at dQ.

#pragma once

#include "kernels/cuda/backward/sm90_turns_tile.cuh"

namespace attend::cuda::backward {

template <class T>
struct TurnsProducer {
  const Sm90Params& params;
  const TurnsWork& work;
  const TurnsShared<T> shared;
  const int lane;
  uint32_t tail_parity = 0;

  // Loads a tile of kCount rows, from `row` of the tensor on.
  template <int kCount>
  __device__ __forceinline__ void LoadBoxes(const CUtensorMap* map, const ConstTensorView& view,
                                            uint32_t to, uint32_t barrier, int head, int row,
                                            CachePolicy policy) {
    const int64_t b = params.pass.attention.problem.packed ? 0 : work.b;
#pragma unroll
    for (int n = 0; n < T::Rows::kBoxes; ++n) {
      LoadBox(map, to + n * kCount * kRowBytes, barrier, n * kCols, row,
              BroadcastIndex(view.stride_h, head), BroadcastIndex(view.stride_b, b), policy);
    }
  }

  // Zeroes the tile from `begin` on, and signals `full`. `terms`: its rows', or 0.
  template <int kCount>
  __device__ __forceinline__ void Patch(uint32_t tile, int begin, uint32_t full, uint32_t terms = 0,
                                        float term = 0.0f) {
    Wait(shared.Tail(), tail_parity);
    tail_parity ^= 1;
    PatchRows<kCount, T::kD>(tile, max(begin, 0), lane);
    if (terms != 0) PatchTerms(terms, max(begin, 0), kCount, term, lane);
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(full);
  }

  // Loads a tile of Q or dO with its rows' terms. Rows beyond the length, which may be another
  // sequence's or have any contents, become zeros with `term` if they might not be finite. `shift`
  // is null if no row has one.
  __device__ __forceinline__ void LoadRows(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to, uint32_t full, int head, int row,
                                           uint32_t terms, const float* from, float term,
                                           uint32_t shifts, const float* shift) {
    const Attention& a = params.pass.attention;
    const bool patch = row + T::kRows > work.band.q_len &&
                       (work.special || a.problem.packed || a.q_lengths != nullptr);
    if (lane == 0) {
      const uint32_t barrier = patch ? shared.Tail() : full;
      ArriveExpecting(barrier, T::Rows::kBytes + T::kTermBytes / 3 * (shift != nullptr ? 2 : 1));
      LoadBoxes<T::kRows>(map, view, to, barrier, head, static_cast<int>(work.s.q_row) + row,
                          CachePolicy::kEvictLast);
      LoadFloats(from, terms, T::kRows, barrier);
      if (shift != nullptr) LoadFloats(shift, shifts, T::kRows, barrier);
    }
    if (patch) Patch<T::kRows>(to, work.band.q_len - row, full, terms, term);
  }

  // Loads the tile of K or V. Keys beyond the length meet weights of 0.
  __device__ __forceinline__ void LoadKeys(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to, uint32_t full) {
    const Attention& a = params.pass.attention;
    const bool patch =
        work.key + T::kKeys > work.band.k_len && (a.problem.packed || a.kv_lengths != nullptr);
    if (lane == 0) {
      const uint32_t barrier = patch ? shared.Tail() : full;
      ArriveExpecting(barrier, T::Keys::kBytes);
      LoadBoxes<T::kKeys>(map, view, to, barrier, static_cast<int>(work.kv_head),
                          static_cast<int>(work.s.k_row) + work.key, CachePolicy::kEvictFirst);
    }
    if (patch) Patch<T::kKeys>(to, work.band.k_len - work.key, full);
  }

  __device__ __forceinline__ void Run() {
    const BackwardPass& pass = params.pass;
    const Attention& a = pass.attention;
    const auto group = static_cast<int>(a.problem.group());
    LoadKeys(&params.maps.k, a.k, shared.K(), shared.FullK());
    Stage<T::kStages> stage;
    for (int n = 0; n < group; ++n) {
      const int head = static_cast<int>(work.kv_head) * group + n;
      const int64_t term = TermIndex(a.problem, work.s, work.b, head, 0);
      for (int row = work.row_end - T::kRows; row >= work.row_begin; row -= T::kRows) {
        const int now = stage.index;
        const uint32_t terms = shared.Terms(now);
        Wait(shared.EmptyQ(now), stage.parity ^ 1);
        LoadRows(&params.maps.q, a.q, shared.Q(now), shared.FullQ(now), head, row, terms,
                 pass.lse + term + row, INFINITY, terms + T::kTermBytes / 3 * 2,
                 work.shifted ? pass.shift + term + row : nullptr);
        if (n == 0 && row == work.row_end - T::kRows) {
          LoadKeys(&params.maps.v, a.v, shared.V(), shared.FullV());
        }
        Wait(shared.EmptyO(now), stage.parity ^ 1);
        LoadRows(&params.maps.o, pass.gradients.d_o, shared.O(now), shared.FullO(now), head, row,
                 terms + T::kTermBytes / 3, pass.less + term + row, 0.0f, 0, nullptr);
        stage.Step();
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

// Tells a consumer when its turn at a half of dQ has come, and the half's address; passes the turn
// to the next block once the consumer's additions are visible. One thread.
template <class T>
struct TurnsKeeper {
  const BackwardPass& pass;
  const TurnsWork& work;
  const TurnsShared<T> shared;
  const int consumer;

  // A step's half of dQ, and the number of blocks that add to it earlier.
  struct Place {
    int64_t half;
    uint32_t earlier;
  };
  __device__ __forceinline__ Place At(int step) const {
    const Problem& p = pass.attention.problem;
    const int tiles = (work.row_end - work.row_begin) / T::kRows;
    const int64_t head = work.kv_head * p.group() + step / tiles;
    const int row = work.row_end - (step % tiles + 1) * T::kRows;
    return {2 * TurnTile(p, work.s, work.b, head, row) + consumer,
            EarlierBlocks<T>(work.band, row, work.key)};
  }

  __device__ __forceinline__ void Give(const Place& place) const {
    asm volatile(
        "st.shared.b64 [%0], %1; st.shared.u32 [%0 + 8], %2;" ::"r"(shared.Place(consumer)),
        "l"(pass.sums + place.half * kTurnHalfFloats), "r"(place.earlier)
        : "memory");
    Arrive(shared.Turn(consumer));
  }

  __device__ __forceinline__ void Run() {
    const int steps = work.template Steps<T>(pass.attention.problem);
    Place place = At(0);
    uint32_t count = ReadCount(pass.turns + place.half);
    for (int step = 0; step < steps; ++step) {
      while (count != place.earlier) count = ReadCount(pass.turns + place.half);
      Give(place);
      const Place next = step + 1 < steps ? At(step + 1) : place;
      count = ReadCount(pass.turns + next.half);  // prefetch while the consumer adds
      Wait(shared.Added(consumer), step & 1);
      PublishCount(pass.turns + place.half, place.earlier + 1);
      place = next;
    }
  }
};

}  // namespace attend::cuda::backward
