// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV by one kernel of wgmma and TMA, TurnsSm90 (sm90_turns.cuh): shared by its warps. A
// block takes works one after another. For 128 keys of a KV head it walks tiles of query rows of
// all the group's heads, the last rows first. dK and dV stay in registers. The keys' contributions
// to a tile's dQ are added in global memory, in fp32 and in key order, for which blocks wait for
// their turns; so bits are a function of the problem alone, and five products are enough.

#pragma once

#include <algorithm>

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

// Registers per thread of the 384 that a block has: consumers get all that the helpers do not need.
inline constexpr int kHelperRegisters = 24;
inline constexpr int kTurnsRegisters = 240;
// Tiles of keys that a block holds: the one it works on, and the next.
inline constexpr int kWorks = 2;
// Per launch: enough to fill a GPU.
inline constexpr int64_t kTurnsBlocks = 132;

template <int kHeadDim>
struct TurnsTile {
  static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128);
  static constexpr int kD = kHeadDim;
  static constexpr int kRows = kD == 64 ? 128 : 64;  // per step, as TurnRows
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kStages = 2;
  using Keys = BoxedTile<kKeys, kD>;
  using Rows = BoxedTile<kRows, kD>;
  using Scores = BoxedTile<kRows, kKeys>;             // dS, a box of 64 keys from each consumer
  static constexpr int kKeySlots = kD == 64 ? 2 : 1;  // tiles of K
  static constexpr int kOffsetV = kKeySlots * Keys::kBytes;
  static constexpr int kOffsetQ = kOffsetV + Keys::kBytes;
  static constexpr int kOffsetO = kOffsetQ + kStages * Rows::kBytes;
  static constexpr int kOffsetScores = kOffsetO + kStages * Rows::kBytes;
  static constexpr int kSumBytes = kTurnHalfFloats * static_cast<int>(sizeof(float));
  static constexpr int kOffsetSums = kOffsetScores + kStages * Scores::kBytes;
  static constexpr int kOffsetTerms = kOffsetSums + kConsumers * kSumBytes;
  static constexpr int kTermBytes =
      3 * kRows * static_cast<int>(sizeof(float));  // LSE, less, shift
  static constexpr int kOffsetBarriers = kOffsetTerms + kStages * kTermBytes;
  static constexpr int kBarriers = 4 + 6 * kStages + 2 * kConsumers + 4 * kWorks;
  static constexpr int kSharedBytes = 1024 + kOffsetBarriers + 8 * kBarriers;
  static_assert(kRows * Rows::kBoxes * kCols == kConsumers * kTurnHalfFloats);
};

template <class T>
struct TurnsShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t K(int n) const { return base + n * T::Keys::kBytes; }
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
  // A consumer's half of a step's dQ.
  __device__ __forceinline__ uint32_t Sums(int consumer) const {
    return base + T::kOffsetSums + consumer * T::kSumBytes;
  }
  __device__ __forceinline__ uint32_t Barriers(int n) const {
    return base + T::kOffsetBarriers + 8 * n;
  }
  __device__ __forceinline__ uint32_t Staged(int kind, int n) const {
    return Barriers(4 + kind * T::kStages + n);
  }
  __device__ __forceinline__ uint32_t FullV() const { return Barriers(0); }
  __device__ __forceinline__ uint32_t EmptyV() const { return Barriers(1); }
  __device__ __forceinline__ uint32_t Tail() const { return Barriers(2); }
  __device__ __forceinline__ uint32_t FullQ(int n) const { return Staged(0, n); }
  __device__ __forceinline__ uint32_t FullO(int n) const { return Staged(1, n); }
  __device__ __forceinline__ uint32_t FullScores(int n) const { return Staged(2, n); }
  __device__ __forceinline__ uint32_t EmptyQ(int n) const { return Staged(3, n); }
  __device__ __forceinline__ uint32_t EmptyO(int n) const { return Staged(4, n); }
  __device__ __forceinline__ uint32_t EmptyScores(int n) const { return Staged(5, n); }
  __device__ __forceinline__ uint32_t FullSums(int consumer) const { return Staged(6, consumer); }
  __device__ __forceinline__ uint32_t EmptySums(int consumer) const {
    return Staged(6, kConsumers + consumer);
  }
  __device__ __forceinline__ uint32_t OfWork(int kind, int n) const {
    return Staged(6, 2 * kConsumers + kind * kWorks + n);
  }
  // All loads of a work have been issued.
  __device__ __forceinline__ uint32_t Loaded() const { return Barriers(3); }
  __device__ __forceinline__ uint32_t FullWork(int n) const { return OfWork(0, n); }
  __device__ __forceinline__ uint32_t FullK(int n) const { return OfWork(1, n); }
  __device__ __forceinline__ uint32_t EmptyWork(int n) const { return OfWork(2, n); }
  __device__ __forceinline__ uint32_t EmptyK(int n) const { return OfWork(3, n); }

  __device__ __forceinline__ void Init() const {
    InitBarrier(FullV(), 1);
    InitBarrier(EmptyV(), 4 * kConsumers);
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
      InitBarrier(FullSums(n), 4);
      InitBarrier(EmptySums(n), 1);
    }
    InitBarrier(Loaded(), 1);
    for (int n = 0; n < kWorks; ++n) {
      InitBarrier(FullWork(n), 1);
      InitBarrier(FullK(n), 1);
      InitBarrier(EmptyK(n), 4 * kConsumers);
      InitBarrier(EmptyWork(n), 5 * kConsumers + 1);
    }
    FenceBarrierInit();
  }
};

// How many blocks of earlier keys add to the rows' dQ before that of `key`. The band has no gaps,
// so a block processes a tile of rows exactly if one of the rows sees one of its keys.
template <class T>
__device__ __forceinline__ uint32_t EarlierBlocks(const Band& band, int row, int key) {
  return static_cast<uint32_t>(key / T::kKeys - band.KeyBegin(row) / T::kKeys);
}

// Heads whose blocks run at about the same time: as many as fit the L2 cache with their rows and
// sums, but at least enough that few blocks of one head, which walk the same rows in turn, run at a
// time.
inline constexpr int64_t kTurnsCacheBytes = int64_t{32} << 20;
inline constexpr int kTurnsHeadsMin = 16;

inline int64_t HeadsAtATime(const Problem& p) {
  if (p.heads_kv == 0) return 0;  // LoadBackward's problems have no heads
  const int64_t bytes = p.len_q * p.group() * (2 * (p.dim + p.dim_v) + 4 * p.dim);
  const int64_t fit = kTurnsCacheBytes / std::max<int64_t>(bytes, 1);
  return std::min(std::max<int64_t>(fit, kTurnsHeadsMin), p.heads_kv * p.batch);
}

// A block's work: a tile of keys.
struct TurnsWork {
  int64_t b, kv_head;
  Sequence s;
  Band band;
  int key;                 // its first
  int row_begin, row_end;  // tiles of rows that see some key; the last may extend beyond
  int whole_end;           // tiles of keys that end by here need at most the mask: k_len, or 0
  bool shifted;            // some row has a shift
  bool special;            // some terms are not finite
  // The first term and the first half of dQ of the group's first head, and their distances from one
  // head to the next. They fit 32 bits, as kTurnBytesMax limits dQ's sums.
  int term, head_terms;
  int half, head_halves;

  // The item's `number`th work. Those of a head's earlier keys have lower numbers. One thread,
  // with few registers: parts are stored as soon as they are known.
  template <class T>
  __device__ __forceinline__ void Set(const Sm90Params& params, int number) {
    const Attention& a = params.pass.attention;
    const Problem& p = a.problem;
    const auto together = static_cast<int>(params.section);
    const int works = static_cast<int>((p.len_k + T::kKeys - 1) / T::kKeys) * together;
    const int first = number / works * together;
    const int within = number % works;
    const int width = min(together, static_cast<int>(params.heads) - first);
    key = within / width * T::kKeys;
    const int head = first + within % width;
    b = head / static_cast<int>(p.heads_kv);
    kv_head = head % static_cast<int>(p.heads_kv);
    Settle();
    s = SequenceOf(a, b);
    Settle();
    band = Band(p, s);
    shifted = params.pass.flags->shifted != 0;
    special = params.pass.flags->special != 0;
    whole_end = shifted ? 0 : band.k_len;
    Settle();
    head_terms = static_cast<int>(TermsOfHead(p));
    head_halves = static_cast<int>(2 * TilesOfHead(p, p.total_q, p.len_q, T::kRows));
    term = static_cast<int>(TermIndex(p, s, b, 0, 0));
    half = static_cast<int>(2 * TileOfHead(p, s.q_row, p.len_q, T::kRows, b, 0));
    Settle();
    term += static_cast<int>(kv_head) * params.group * head_terms;
    half += static_cast<int>(kv_head) * params.group * head_halves;
    Settle();
    const int begin = band.RowBegin(key);
    const int end = band.RowEnd(min(key + T::kKeys, band.k_len) - 1);
    const bool empty = key >= band.k_len || begin >= end;
    row_begin = empty ? 0 : begin / T::kRows * T::kRows;
    row_end = empty ? 0 : (end + T::kRows - 1) / T::kRows * T::kRows;
  }
  static __device__ __forceinline__ void Settle() { asm volatile("" ::: "memory"); }

  __device__ __forceinline__ bool Empty() const { return row_begin >= row_end; }
  template <class T>
  __device__ __forceinline__ int Steps(const Sm90Params& params) const {
    return params.group * ((row_end - row_begin) / T::kRows);
  }
};

// A work in shared memory. What a warp must know of a block's earlier works is here too, because
// helpers have few registers.
struct TurnsPlace {
  TurnsWork work;
  int item;   // of the launch; -1: no work is left
  int nth;    // of the block
  int loads;  // earlier works that are not empty
  int steps;  // of these
  int next_steps;

  template <class List>
  __device__ __forceinline__ const Sm90Params& Item(const List& list) const {
    return list.items[List::kItems == 1 ? 0 : item];
  }
  __device__ __forceinline__ int Slot() const { return nth % kWorks; }
  // Where K is in shared memory, and the parity of its barriers.
  template <class T>
  __device__ __forceinline__ int KeySlot() const {
    int slot = loads % T::kKeySlots;
    asm volatile("" : "+r"(slot));  // opaque: addresses of K would otherwise occupy registers
    return slot;
  }
  template <class T>
  __device__ __forceinline__ int KeyParity() const {
    return loads / T::kKeySlots % 2;
  }

  // Before the first work. One thread.
  __device__ __forceinline__ void Begin() {
    nth = -1;
    loads = next_steps = steps = 0;
  }
  // Takes the next work of the launch, after `last`. One thread.
  template <class T, class List>
  __device__ __forceinline__ void Take(const List& list, const TurnsPlace& last) {
    nth = last.nth + 1;
    loads = last.loads + (last.next_steps > last.steps ? 1 : 0);
    steps = last.next_steps;
    TurnsWork::Settle();
    const uint32_t number = atomicAdd(&list.items[0].pass.flags->begun, 1);
    item = number < list.blocks ? list.Index(number) : -1;
    if (item < 0) return;
    const Sm90Params& params = Item(list);
    work.Set<T>(params, static_cast<int>(number - params.pass.first_block));
    next_steps = steps + work.template Steps<T>(params);
  }
};

}  // namespace attend::cuda::backward
