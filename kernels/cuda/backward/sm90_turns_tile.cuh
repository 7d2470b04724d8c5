// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV by one kernel of wgmma and TMA, TurnsSm90 (sm90_turns.cuh): shared by its warps. A
// block has 128 keys of a KV head and walks tiles of query rows of all the group's heads, the last
// rows first. dK and dV stay in registers. The keys' contributions to a tile's dQ are added in
// global memory, in fp32 and in key order, for which blocks wait for their turns; so bits are a
// function of the problem alone, and five products are enough.

#pragma once

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

// Registers per thread of the 384 that a block has: consumers get all that the helpers do not need.
inline constexpr int kHelperRegisters = 24;
inline constexpr int kTurnsRegisters = 240;

template <int kHeadDim>
struct TurnsTile {
  static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128);
  static constexpr int kD = kHeadDim;
  static constexpr int kRows = kD == 64 ? 128 : 64;  // per step, as TurnRows
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kStages = 2;
  using Keys = BoxedTile<kKeys, kD>;
  using Rows = BoxedTile<kRows, kD>;
  using Scores = BoxedTile<kRows, kKeys>;  // dS, a box of 64 keys from each consumer
  static constexpr int kOffsetV = Keys::kBytes;
  static constexpr int kOffsetQ = kOffsetV + Keys::kBytes;
  static constexpr int kOffsetO = kOffsetQ + kStages * Rows::kBytes;
  static constexpr int kOffsetScores = kOffsetO + kStages * Rows::kBytes;
  static constexpr int kOffsetTerms = kOffsetScores + kStages * Scores::kBytes;
  static constexpr int kTermBytes =
      3 * kRows * static_cast<int>(sizeof(float));  // LSE, less, shift
  static constexpr int kOffsetPlaces = kOffsetTerms + kStages * kTermBytes;
  static constexpr int kPlaceBytes = 16;
  static constexpr int kOffsetBarriers = kOffsetPlaces + kConsumers * kPlaceBytes;
  static constexpr int kBarriers = 3 + 6 * kStages + 2 * kConsumers;
  static constexpr int kSharedBytes = 1024 + kOffsetBarriers + 8 * kBarriers;
  static_assert(kRows * Rows::kBoxes * kCols == kConsumers * kTurnHalfFloats);
};

template <class T>
struct TurnsShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t K() const { return base; }
  __device__ __forceinline__ uint32_t V() const { return base + T::kOffsetV; }
  __device__ __forceinline__ uint32_t Q(int n) const {
    return base + T::kOffsetQ + n * T::Rows::kBytes;
  }
  __device__ __forceinline__ uint32_t O(int n) const {
    return base + T::kOffsetO + n * T::Rows::kBytes;
  }
  __device__ __forceinline__ uint32_t Scores(int n) const {
    return base + T::kOffsetScores + n * T::Scores::kBytes;
  }
  __device__ __forceinline__ uint32_t Terms(int n) const {
    return base + T::kOffsetTerms + n * T::kTermBytes;
  }
  // Where a consumer's half of dQ is added: its address, and how many blocks have added to it.
  __device__ __forceinline__ uint32_t Place(int consumer) const {
    return base + T::kOffsetPlaces + consumer * T::kPlaceBytes;
  }
  __device__ __forceinline__ uint32_t Barriers(int n) const {
    return base + T::kOffsetBarriers + 8 * n;
  }
  __device__ __forceinline__ uint32_t Staged(int kind, int n) const {
    return Barriers(3 + kind * T::kStages + n);
  }
  __device__ __forceinline__ uint32_t FullK() const { return Barriers(0); }
  __device__ __forceinline__ uint32_t FullV() const { return Barriers(1); }
  __device__ __forceinline__ uint32_t Tail() const { return Barriers(2); }
  __device__ __forceinline__ uint32_t FullQ(int n) const { return Staged(0, n); }
  __device__ __forceinline__ uint32_t FullO(int n) const { return Staged(1, n); }
  __device__ __forceinline__ uint32_t FullScores(int n) const { return Staged(2, n); }
  __device__ __forceinline__ uint32_t EmptyQ(int n) const { return Staged(3, n); }
  __device__ __forceinline__ uint32_t EmptyO(int n) const { return Staged(4, n); }
  __device__ __forceinline__ uint32_t EmptyScores(int n) const { return Staged(5, n); }
  __device__ __forceinline__ uint32_t Turn(int consumer) const { return Staged(6, consumer); }
  __device__ __forceinline__ uint32_t Added(int consumer) const {
    return Staged(6, kConsumers + consumer);
  }

  __device__ __forceinline__ void Init() const {
    InitBarrier(FullK(), 1);
    InitBarrier(FullV(), 1);
    InitBarrier(Tail(), 1);
    for (int n = 0; n < T::kStages; ++n) {
      InitBarrier(FullQ(n), 1);
      InitBarrier(FullO(n), 1);
      InitBarrier(FullScores(n), 4 * kConsumers);
      InitBarrier(EmptyQ(n), 4 * kConsumers);
      InitBarrier(EmptyO(n), 4 * kConsumers);
      InitBarrier(EmptyScores(n), 4 * kConsumers);
    }
    for (int n = 0; n < kConsumers; ++n) {
      InitBarrier(Turn(n), 1);
      InitBarrier(Added(n), 4);
    }
    FenceBarrierInit();
  }
};

// Heads whose blocks run at about the same time: as many as fit the L2 cache with their rows and
// sums, but at least enough that few blocks of one head, which walk the same rows in turn, run at a
// time.
inline constexpr int64_t kTurnsCacheBytes = int64_t{32} << 20;
inline constexpr int kTurnsHeadsMin = 16;

__device__ __forceinline__ int HeadsAtATime(const Problem& p) {
  const int64_t bytes = p.len_q * p.group() * (2 * (p.dim + p.dim_v) + 4 * p.dim);
  const auto fit = static_cast<int>(kTurnsCacheBytes / max(bytes, int64_t{1}));
  return min(max(fit, kTurnsHeadsMin), static_cast<int>(p.heads_kv * p.batch));
}

// A block's work.
struct TurnsWork {
  int64_t b, kv_head;
  Sequence s;
  Band band;
  int key;                 // its first
  int row_begin, row_end;  // tiles of rows that see some key; the last may extend beyond
  int whole_end;           // tiles of keys that end by here need at most the mask: k_len, or 0
  bool shifted;            // some row has a shift
  bool special;            // some terms are not finite

  // The work of the block that started as `number`th. Blocks of a head's earlier keys have lower
  // numbers.
  template <class T>
  static __device__ __forceinline__ TurnsWork Of(const BackwardPass& pass, int number, T) {
    const Attention& a = pass.attention;
    const Problem& p = a.problem;
    const auto heads = static_cast<int>(p.heads_kv * p.batch);
    const int together = HeadsAtATime(p);
    const int blocks = static_cast<int>((p.len_k + T::kKeys - 1) / T::kKeys) * together;
    const int first = number / blocks * together;
    const int within = number % blocks;
    const int width = min(together, heads - first);
    const int head = first + within % width;
    const int b = head / static_cast<int>(p.heads_kv);
    const Sequence s = SequenceOf(a, b);
    TurnsWork work{b,
                   head % static_cast<int>(p.heads_kv),
                   s,
                   Band(p, s),
                   within / width * T::kKeys,
                   0,
                   0,
                   0,
                   pass.flags->shifted != 0,
                   pass.flags->special != 0};
    if (!work.shifted) work.whole_end = work.band.k_len;
    if (work.key >= work.band.k_len) return work;
    const int last = min(work.key + T::kKeys, work.band.k_len) - 1;
    const int begin = work.band.RowBegin(work.key);
    const int end = work.band.RowEnd(last);
    if (begin >= end) return work;
    work.row_begin = begin / T::kRows * T::kRows;
    work.row_end = (end + T::kRows - 1) / T::kRows * T::kRows;
    return work;
  }

  __device__ __forceinline__ bool Empty() const { return row_begin >= row_end; }
  template <class T>
  __device__ __forceinline__ int Steps(const Problem& p) const {
    return static_cast<int>(p.group()) * ((row_end - row_begin) / T::kRows);
  }
};

// How many blocks of earlier keys add to the rows' dQ before that of `key`. The band has no gaps,
// so a block processes a tile of rows exactly if one of the rows sees one of its keys.
template <class T>
__device__ __forceinline__ uint32_t EarlierBlocks(const Band& band, int row, int key) {
  return static_cast<uint32_t>(key / T::kKeys - band.KeyBegin(row) / T::kKeys);
}

}  // namespace attend::cuda::backward
