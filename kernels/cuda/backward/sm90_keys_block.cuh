// SPDX-License-Identifier: Apache-2.0
//
// dK and dV by wgmma, shared by both ways of dividing a block's work: its tiles in shared memory,
// its work, the loading warp, and the kernel. A block has a tile of keys of a KV head and walks
// tiles of query rows of all the group's heads. Scores and dP are computed transposed, keys down,
// so that P and dS leave one product as the register operand of the next.

#pragma once

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

// For consumers that split a block's work: kExchanges buffers for passing weights between them; at
// most kHeld fragments of 16 columns of K or V are kept in registers.
template <int kHeadDim, int kValueDim, int kKeyRows, int kQueryRows, int kQueryStages,
          int kExchangeBuffers = 0, int kHeldMost = 0>
struct KeysTile {
  static constexpr int kD = kHeadDim;
  static constexpr int kDv = kValueDim;
  static constexpr int kKeys = kKeyRows;
  static constexpr int kRows = kQueryRows;  // per step
  static constexpr int kStages = kQueryStages;
  static constexpr int kExchanges = kExchangeBuffers;
  static constexpr int kHeldK = kHeldMost < kD / 16 ? kHeldMost : kD / 16;
  static constexpr int kHeldV = kHeldMost < kDv / 16 ? kHeldMost : kDv / 16;
  using K = BoxedTile<kKeys, kD>;
  using V = BoxedTile<kKeys, kDv>;
  using Q = BoxedTile<kRows, kD>;
  using O = BoxedTile<kRows, kDv>;
  static constexpr int kOffsetV = K::kBytes;
  static constexpr int kOffsetQ = kOffsetV + V::kBytes;
  static constexpr int kOffsetO = kOffsetQ + kStages * Q::kBytes;
  static constexpr int kOffsetExchange = kOffsetO + kStages * O::kBytes;
  static constexpr int kExchangeBytes = 64 * kRows * static_cast<int>(sizeof(float));
  static constexpr int kOffsetTerms = kOffsetExchange + kExchanges * kExchangeBytes;
  static constexpr int kTermBytes =
      3 * kRows * static_cast<int>(sizeof(float));  // LSE, less, shift
  static constexpr int kOffsetBarriers = kOffsetTerms + kStages * kTermBytes;
  static constexpr int kSharedBytes =
      1024 + kOffsetBarriers + 8 * (2 + 4 * kStages + 2 * kExchanges);
  static_assert(kSharedBytes <= kSharedBytesMax);
};

template <class T>
struct KeysShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t K() const { return base; }
  __device__ __forceinline__ uint32_t V() const { return base + T::kOffsetV; }
  __device__ __forceinline__ uint32_t Q(int n) const {
    return base + T::kOffsetQ + n * T::Q::kBytes;
  }
  __device__ __forceinline__ uint32_t O(int n) const {
    return base + T::kOffsetO + n * T::O::kBytes;
  }
  __device__ __forceinline__ uint32_t Terms(int n) const {
    return base + T::kOffsetTerms + n * T::kTermBytes;
  }
  __device__ __forceinline__ uint32_t Barriers(int n) const {
    return base + T::kOffsetBarriers + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullKeys() const { return Barriers(0); }
  __device__ __forceinline__ uint32_t Tail() const { return Barriers(1); }
  __device__ __forceinline__ uint32_t FullQ(int n) const { return Barriers(2 + n); }
  __device__ __forceinline__ uint32_t FullO(int n) const { return Barriers(2 + T::kStages + n); }
  __device__ __forceinline__ uint32_t EmptyQ(int n) const {
    return Barriers(2 + 2 * T::kStages + n);
  }
  __device__ __forceinline__ uint32_t EmptyO(int n) const {
    return Barriers(2 + 3 * T::kStages + n);
  }
  __device__ __forceinline__ uint32_t Exchange(int n) const {
    return base + T::kOffsetExchange + n * T::kExchangeBytes;
  }
  __device__ __forceinline__ uint32_t FullExchange(int n) const {
    return Barriers(2 + 4 * T::kStages + n);
  }
  __device__ __forceinline__ uint32_t EmptyExchange(int n) const {
    return Barriers(2 + 4 * T::kStages + T::kExchanges + n);
  }
};

// A block's work.
struct KeysWork {
  int64_t b, kv_head;
  Sequence s;
  Band band;
  int key;                 // its first
  int row_begin, row_end;  // tiles of rows that see some key

  // The first keys go first: under a causal mask most rows see them.
  template <class T>
  static __device__ __forceinline__ KeysWork Of(const Sm90Params& params, T) {
    const Problem& p = params.pass.attention.problem;
    const BlockPlace place =
        BlockPlace::Of(params, (p.len_k + T::kKeys - 1) / T::kKeys, BlockIndex());
    const int64_t b = place.head / p.heads_kv;
    const Sequence s = SequenceOf(params.pass.attention, b);
    KeysWork work{
        b, place.head % p.heads_kv, s, Band(p, s), static_cast<int>(place.tile) * T::kKeys, 0, 0};
    if (work.key >= work.band.k_len) return work;
    const int last = min(work.key + T::kKeys, work.band.k_len) - 1;
    const int begin = work.band.RowBegin(work.key);
    const int end = work.band.RowEnd(last);
    if (begin >= end) return work;
    work.row_begin = begin / T::kRows * T::kRows;
    work.row_end = end;
    return work;
  }
};

template <class T>
struct KeysProducer {
  const Sm90Params& params;
  const KeysWork& work;
  const KeysShared<T> shared;
  const int lane;
  const bool shifted;  // some rows have a shift
  const bool special;  // some terms are not finite
  uint32_t tail_parity = 0;

  // Loads a tile of Q or dO. Rows beyond the length may be another sequence's, or have any
  // contents.
  template <class Tile>
  __device__ __forceinline__ void LoadRows(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to, uint32_t empty, uint32_t parity,
                                           uint32_t full, int head, int row, uint32_t terms,
                                           int64_t term) {
    const bool patch = row + T::kRows > work.band.q_len &&
                       ((special && terms != 0) || params.pass.attention.problem.packed ||
                        params.pass.attention.q_lengths != nullptr);
    if (lane == 0) {
      Wait(empty, parity ^ 1);
      const uint32_t barrier = patch ? shared.Tail() : full;
      ArriveExpecting(barrier,
                      Tile::kBytes + (terms != 0 ? T::kTermBytes / 3 * (shifted ? 3 : 2) : 0));
      LoadTile<Tile>(
          map, to, barrier, static_cast<int>(work.s.q_row) + row,
          BroadcastIndex(view.stride_h, head),
          BroadcastIndex(view.stride_b, params.pass.attention.problem.packed ? 0 : work.b),
          CachePolicy::kEvictLast);
      if (terms != 0) {
        LoadFloats(params.pass.lse + term, terms, T::kRows, barrier);
        LoadFloats(params.pass.less + term, terms + 4 * T::kRows, T::kRows, barrier);
        if (shifted) {
          LoadFloats(params.pass.shift + term, terms + 8 * T::kRows, T::kRows, barrier);
        }
      }
    }
    if (!patch) return;
    Wait(shared.Tail(), tail_parity);
    tail_parity ^= 1;
    const int begin = max(work.band.q_len - row, 0);
    PatchRows<T::kRows, Tile::kDim>(to, begin, lane);
    if (terms != 0) {
      PatchTerms(terms, begin, T::kRows, INFINITY, lane);
      PatchTerms(terms + 4 * T::kRows, begin, T::kRows, 0.0f, lane);
    }
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(full);
  }

  __device__ __forceinline__ void LoadKeys() {
    if (lane != 0) return;
    const Attention& a = params.pass.attention;
    const int batch = a.problem.packed ? 0 : static_cast<int>(work.b);
    const int row = static_cast<int>(work.s.k_row) + work.key;
    const int head = static_cast<int>(work.kv_head);
    ArriveExpecting(shared.FullKeys(), T::K::kBytes + T::V::kBytes);
    LoadTile<typename T::K>(&params.maps.k, shared.K(), shared.FullKeys(), row,
                            BroadcastIndex(a.k.stride_h, head), BroadcastIndex(a.k.stride_b, batch),
                            CachePolicy::kEvictFirst);
    LoadTile<typename T::V>(&params.maps.v, shared.V(), shared.FullKeys(), row,
                            BroadcastIndex(a.v.stride_h, head), BroadcastIndex(a.v.stride_b, batch),
                            CachePolicy::kEvictFirst);
  }

  __device__ __forceinline__ void Run() {
    const BackwardPass& pass = params.pass;
    const auto group = static_cast<int>(pass.attention.problem.group());
    LoadKeys();
    Stage<T::kStages> stage;
    for (int n = 0; n < group; ++n) {
      const int head = static_cast<int>(work.kv_head) * group + n;
      const int64_t term = TermIndex(pass.attention.problem, work.s, work.b, head, 0);
      for (int row = work.row_begin; row < work.row_end; row += T::kRows) {
        LoadRows<typename T::Q>(&params.maps.q, pass.attention.q, shared.Q(stage.index),
                                shared.EmptyQ(stage.index), stage.parity, shared.FullQ(stage.index),
                                head, row, shared.Terms(stage.index), term + row);
        LoadRows<typename T::O>(&params.maps.o, pass.gradients.d_o, shared.O(stage.index),
                                shared.EmptyO(stage.index), stage.parity, shared.FullO(stage.index),
                                head, row, 0, 0);
        stage.Step();
      }
    }
  }
};

// Per-thread state and operations for a consumer's two keys, 8 apart.
template <class T, class Class>
struct KeysOfThread {
  static constexpr int kPairs = T::kRows / 2;  // per tile

  const Sm90Params& params;
  const KeysWork& work;
  const bool& shifted;  // in shared memory: some rows have a shift
  const int first;      // the warpgroup's first key
  const int key;        // the thread's first
  const WeightRule<Class> rule;

  __device__ __forceinline__ KeysOfThread(const Sm90Params& params, const KeysWork& work,
                                          const bool& shifted, int first)
      : params(params),
        work(work),
        shifted(shifted),
        first(first),
        key(RowOfThread(first)),
        rule(params) {}

  // Steps over all heads.
  __device__ __forceinline__ int Steps() const {
    const int tiles = (work.row_end - work.row_begin + T::kRows - 1) / T::kRows;
    return static_cast<int>(params.pass.attention.problem.group()) * tiles;
  }
  __device__ __forceinline__ int NextRow(int row) const {
    return row + T::kRows >= work.row_end ? work.row_begin : row + T::kRows;
  }

  // Caps or shifts scores, and hides pairs that do not see each other.
  __device__ __forceinline__ void FinishScores(float (&scores)[kPairs], int row,
                                               uint32_t terms) const {
    rule.Cap(scores);
    if (Class::kShifts && shifted) ShiftScores(scores, terms + 8 * T::kRows);
    if (row < work.band.RowBegin(first + 63) || row + T::kRows > work.band.RowEnd(first)) {
      MaskScores(scores, row);
    }
  }
  __device__ __forceinline__ void MaskScores(float (&scores)[kPairs], int row) const {
    const int left = row + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = work.band.RowBegin(key + 8 * r) - left;
      const int end = work.band.RowEnd(key + 8 * r) - left;
#pragma unroll
      for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * j + i < begin || 8 * j + i >= end) {
            scores[4 * j + 2 * r + i] = NegativeInfinity();
          }
        }
      }
    }
  }

  // Terms of the thread's rows in a block of 8: LSE, and what is subtracted from dP.
  static __device__ __forceinline__ float2 Lse2(uint32_t terms, int j) {
    return LoadShared2(terms + 4 * (8 * j + 2 * (threadIdx.x % 4)));
  }
  static __device__ __forceinline__ float2 Less(uint32_t terms, int j) {
    return LoadShared2(terms + 4 * (T::kRows + 8 * j + 2 * (threadIdx.x % 4)));
  }

  // `first_key`: the warpgroup's, relative to the block's.
  template <int kDim>
  __device__ __forceinline__ void Store(const TensorView& to, const float (&sums)[kDim / 2],
                                        float factor, int64_t dim, int first_key) const {
    if (to.data == nullptr) return;
    const Problem& p = params.pass.attention.problem;
    const KeysWork at = KeysWork::Of(params, T{});
    uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : at.b) * to.stride_b +
                           at.kv_head * to.stride_h + at.s.k_row * to.stride_l;
    const int count = p.packed ? at.band.k_len : static_cast<int>(p.len_k);
    if (StoreRows<kDim, Class::kBfloat16, true>(sums, factor, data, to.stride_l,
                                                RowOfThread(at.key + first_key), at.band.k_len,
                                                count, static_cast<int>(dim))) {
      params.pass.flags->redo = 1;
    }
  }
};

// Consumer: KeysConsumer or SplitKeysConsumer.
template <class T, class Consumer, int kCount>
__global__ void __launch_bounds__(kThreads, 1)
    KeysSm90(const __grid_constant__ LaunchList<Sm90Params, kCount> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const KeysShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  const Sm90Params& params = list.Of(blockIdx.x);
  const KeysWork work = KeysWork::Of(params, T{});
  __shared__ bool shifted;
  if (threadIdx.x == 0) {
    shifted = params.pass.flags->shifted != 0;
    InitBarrier(shared.FullKeys(), 1);
    InitBarrier(shared.Tail(), 1);
    for (int n = 0; n < T::kStages; ++n) {
      InitBarrier(shared.FullQ(n), 1);
      InitBarrier(shared.FullO(n), 1);
      InitBarrier(shared.EmptyQ(n), 4 * kConsumers);
      InitBarrier(shared.EmptyO(n), 4 * kConsumers);
    }
    for (int n = 0; n < T::kExchanges; ++n) {
      InitBarrier(shared.FullExchange(n), 4);
      InitBarrier(shared.EmptyExchange(n), 4);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ReleaseRegisters<kProducerRegisters>();
    if (warp == 0 && work.row_begin < work.row_end) {
      KeysProducer<T> producer{params,  work,
                               shared,  static_cast<int>(threadIdx.x % 32),
                               shifted, params.pass.flags->special != 0};
      producer.Run();
    }
  } else {
    TakeRegisters<kConsumerRegisters>();
    Consumer consumer(params, work, shared, shifted, warp / 4 - 1);
    consumer.Run();
  }
#endif
}

}  // namespace attend::cuda::backward
