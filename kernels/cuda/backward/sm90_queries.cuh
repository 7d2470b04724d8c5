// SPDX-License-Identifier: Apache-2.0
//
// dQ by wgmma. A block has 128 query rows of a head, 64 per consumer, and walks tiles of keys. As
// in the forward pass, rows are down, and each product's result is the register operand of the
// next. A step:
//
//   Tensor Cores | dP     | dQ += dS K, next scores |
//   warpgroup    | P      | (waits)                 | dS ...

#pragma once

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

template <int kHeadDim, int kValueDim, int kKeyRows, int kKeyStages, int kValueStages>
struct QueriesTile {
  static constexpr int kD = kHeadDim;
  static constexpr int kDv = kValueDim;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = kKeyRows;  // per step
  static constexpr int kStagesK = kKeyStages;
  static constexpr int kStagesV = kValueStages;
  using Q = BoxedTile<kRows, kD>;
  using O = BoxedTile<kRows, kDv>;
  using K = BoxedTile<kKeys, kD>;
  using V = BoxedTile<kKeys, kDv>;
  static constexpr int kOffsetO = Q::kBytes;
  static constexpr int kOffsetK = kOffsetO + O::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStagesK * K::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + kStagesV * V::kBytes;
  static constexpr int kBarriers = 2 * (1 + kStagesK + kStagesV);
  static constexpr int kSharedBytes = 1024 + kOffsetBarriers + 8 * kBarriers;
  static_assert(kSharedBytes <= kSharedBytesMax);
};

template <class T>
struct QueriesShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t Q() const { return base; }
  __device__ __forceinline__ uint32_t O() const { return base + T::kOffsetO; }
  __device__ __forceinline__ uint32_t K(int n) const {
    return base + T::kOffsetK + n * T::K::kBytes;
  }
  __device__ __forceinline__ uint32_t V(int n) const {
    return base + T::kOffsetV + n * T::V::kBytes;
  }
  __device__ __forceinline__ uint32_t Barriers(int n) const {
    return base + T::kOffsetBarriers + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullRows() const { return Barriers(0); }
  __device__ __forceinline__ uint32_t Tail() const { return Barriers(1); }
  __device__ __forceinline__ uint32_t FullK(int n) const { return Barriers(2 + n); }
  __device__ __forceinline__ uint32_t EmptyK(int n) const { return Barriers(2 + T::kStagesK + n); }
  __device__ __forceinline__ uint32_t FullV(int n) const {
    return Barriers(2 + 2 * T::kStagesK + n);
  }
  __device__ __forceinline__ uint32_t EmptyV(int n) const {
    return Barriers(2 + 2 * T::kStagesK + T::kStagesV + n);
  }

  __device__ __forceinline__ void Init() const {
    InitBarrier(FullRows(), 1);
    InitBarrier(Tail(), 1);
    for (int n = 0; n < T::kStagesK; ++n) {
      InitBarrier(FullK(n), 1);
      InitBarrier(EmptyK(n), 4 * kConsumers);
    }
    for (int n = 0; n < T::kStagesV; ++n) {
      InitBarrier(FullV(n), 1);
      InitBarrier(EmptyV(n), 4 * kConsumers);
    }
    FenceBarrierInit();
  }
};

// A block's work.
struct QueriesWork {
  int64_t b, head;
  Sequence s;
  Band band;
  int row;                 // its first
  int key_begin, key_end;  // tiles of keys that some row sees

  // The last rows go first: under a causal mask they see most keys.
  template <class T>
  static __device__ __forceinline__ QueriesWork Of(const Sm90Params& params, T,
                                                   uint32_t block = BlockIndex()) {
    const Problem& p = params.pass.attention.problem;
    const int64_t tiles = (p.len_q + T::kRows - 1) / T::kRows;
    const BlockPlace place = BlockPlace::Of(params, tiles, block);
    const int64_t b = place.head / p.heads_q;
    const Sequence s = SequenceOf(params.pass.attention, b);
    QueriesWork work{b,
                     place.head % p.heads_q,
                     s,
                     Band(p, s),
                     static_cast<int>(tiles - 1 - place.tile) * T::kRows,
                     0,
                     0};
    if (work.row >= work.band.q_len) return work;
    const int last = min(work.row + T::kRows, work.band.q_len) - 1;
    const int begin = work.band.KeyBegin(work.row);
    const int end = work.band.KeyEnd(last);
    if (begin >= end) return work;
    work.key_begin = begin / T::kKeys * T::kKeys;
    work.key_end = end;
    return work;
  }
};

template <class T>
struct QueriesProducer {
  const Sm90Params& params;
  const QueriesWork& work;
  const QueriesShared<T> shared;
  const int lane;
  uint32_t tail_parity = 0;

  // Loads a tile of K or V. Keys beyond the length may be another sequence's, or have any contents.
  template <class Tile>
  __device__ __forceinline__ void LoadKeys(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to, uint32_t empty, uint32_t parity,
                                           uint32_t full, int key) {
    const Attention& a = params.pass.attention;
    const bool patch =
        key + T::kKeys > work.band.k_len && (a.problem.packed || a.kv_lengths != nullptr);
    const uint32_t barrier = patch ? shared.Tail() : full;
    if (lane == 0) {
      const auto head = static_cast<int>(work.head / a.problem.group());
      Wait(empty, parity ^ 1);
      ArriveExpecting(barrier, Tile::kBytes);
      LoadTile<Tile>(map, to, barrier, static_cast<int>(work.s.k_row) + key,
                     BroadcastIndex(view.stride_h, head),
                     BroadcastIndex(view.stride_b, a.problem.packed ? 0 : work.b),
                     CachePolicy::kEvictLast);
    }
    if (!patch) return;
    Wait(shared.Tail(), tail_parity);
    tail_parity ^= 1;
    PatchRows<T::kKeys, Tile::kDim>(to, work.band.k_len - key, lane);
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(full);
  }

  template <class Tile>
  __device__ __forceinline__ void LoadRows(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to) {
    const int batch = params.pass.attention.problem.packed ? 0 : static_cast<int>(work.b);
    LoadTile<Tile>(map, to, shared.FullRows(), static_cast<int>(work.s.q_row) + work.row,
                   BroadcastIndex(view.stride_h, static_cast<int>(work.head)),
                   BroadcastIndex(view.stride_b, batch), CachePolicy::kEvictFirst);
  }

  __device__ __forceinline__ void Run() {
    const BackwardPass& pass = params.pass;
    if (lane == 0) {
      ArriveExpecting(shared.FullRows(), T::Q::kBytes + T::O::kBytes);
      LoadRows<typename T::Q>(&params.maps.q, pass.attention.q, shared.Q());
      LoadRows<typename T::O>(&params.maps.o, pass.gradients.d_o, shared.O());
    }
    Stage<T::kStagesK> k;
    Stage<T::kStagesV> v;
    for (int key = work.key_begin; key < work.key_end; key += T::kKeys) {
      LoadKeys<typename T::K>(&params.maps.k, pass.attention.k, shared.K(k.index),
                              shared.EmptyK(k.index), k.parity, shared.FullK(k.index), key);
      k.Step();
      LoadKeys<typename T::V>(&params.maps.v, pass.attention.v, shared.V(v.index),
                              shared.EmptyV(v.index), v.parity, shared.FullV(v.index), key);
      v.Step();
    }
  }
};

template <class T, class Class>
struct QueriesConsumer {
  static constexpr int kPairs = T::kKeys / 2;  // per thread: two rows, 8 apart
  static constexpr bool kBfloat16 = Class::kBfloat16;

  const Sm90Params& params;
  const QueriesWork& work;
  const QueriesShared<T> shared;
  const int group;      // warpgroup
  const int first_row;  // the warpgroup's
  const int row;        // this thread's first; the second is row + 8
  const WeightRule<Class> rule;
  // In shared memory: whether some row has a shift, and the shifts of the block's rows.
  const bool& shifted;
  float (&shifts)[T::kRows];
  DropoutLane dropout = {};  // if the class has dropout
  float lse2[2], less[2];
  float scores[kPairs], d_weights[kPairs];
  float d_q[T::kD / 2];
  uint32_t d_scores[kPairs / 2];

  __device__ __forceinline__ QueriesConsumer(const Sm90Params& params, const QueriesWork& work,
                                             const QueriesShared<T>& shared, const bool& shifted,
                                             float (&shifts)[T::kRows], int group)
      : params(params),
        work(work),
        shared(shared),
        group(group),
        first_row(work.row + 64 * group),
        row(RowOfThread(first_row)),
        rule(params),
        shifted(shifted),
        shifts(shifts) {
    if constexpr (Class::kDropout) {
      dropout = DropoutLane::Of(params.pass.attention, static_cast<int>(work.b),
                                static_cast<int>(work.head), row, threadIdx.x % 32);
    }
  }

  __device__ __forceinline__ void IssueScores(int stage) {
    WgmmaFence();
    IssueAlong<T::kKeys, T::kD, kBfloat16>(scores, shared.Q() + group * 64 * kRowBytes,
                                           T::Q::kBoxBytes, shared.K(stage), T::K::kBoxBytes);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueDWeights(int stage) {
    WgmmaFence();
    IssueAlong<T::kKeys, T::kDv, kBfloat16>(d_weights, shared.O() + group * 64 * kRowBytes,
                                            T::O::kBoxBytes, shared.V(stage), T::V::kBoxBytes);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueQueries(int stage, bool accumulate) {
    WgmmaFence();
    IssueDown<T::kKeys, T::kD, kBfloat16>(d_q, d_scores, shared.K(stage), T::K::kBoxBytes,
                                          accumulate);
    WgmmaCommit();
  }

  __device__ __forceinline__ void MaskScores(int key) {
    const int left = key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = work.band.KeyBegin(row + 8 * r) - left;
      const int end = work.band.KeyEnd(row + 8 * r) - left;
#pragma unroll
      for (int j = 0; j < T::kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * j + i < begin || 8 * j + i >= end) {
            scores[4 * j + 2 * r + i] = NegativeInfinity();
          }
        }
      }
    }
  }

  // Turns scores into weights, with the cap's slope, for dS.
  __device__ __forceinline__ void Exponentiate(int key) {
    if (Class::kShifts && shifted) {
      const int mine = RowOfThread(64 * group);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) scores[n] -= shifts[mine + n / 2 % 2 * 8];
    }
    if (key < work.band.KeyBegin(first_row + 63) || key + T::kKeys > work.band.KeyEnd(first_row)) {
      MaskScores(key);
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      scores[n] = rule.Sloped(rule.Weight(scores[n], lse2[n / 2 % 2]), scores[n]);
    }
    if constexpr (Class::kDropout) MarkDropped(key);
  }

  // For the keys from `key` on.
  __device__ __forceinline__ void MarkDropped(int key) {
#pragma unroll
    for (int j = 0; j < T::kKeys / 8; j += 2) {
      const DropoutBits bits = dropout.Draw<true>(0, key + 8 * j);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint32_t word = bits.words[n / 2 % 2 * 2 + n / 4];
        float& x = scores[4 * j + n];
        x = Marked(x, (n % 2 == 0 ? word << 16 : word) >= dropout.least);
      }
    }
  }

  __device__ __forceinline__ void Differentiate() {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      d_weights[n] = DScore(rule, scores[n], d_weights[n], less[n / 2 % 2]);
    }
    PackAll<kBfloat16>(d_weights, d_scores);
  }

  __device__ __forceinline__ void Accumulate() {
    Stage<T::kStagesK> k;
    Stage<T::kStagesV> v;
    Wait(shared.FullRows(), 0);
    Wait(shared.FullK(0), 0);
    IssueScores(0);
    WgmmaWait<0>();
    HoldRegisters(scores);
    for (int key = work.key_begin; key < work.key_end; key += T::kKeys) {
      const int now = k.index;
      rule.Cap(scores);  // here, while dP's registers are not in use
      Wait(shared.FullV(v.index), v.parity);
      IssueDWeights(v.index);
      Exponentiate(key);
      WgmmaWait<0>();
      HoldRegisters(d_weights);
      Release(shared.EmptyV(v.index));
      Differentiate();
      IssueQueries(now, key > work.key_begin);
      k.Step();
      v.Step();
      if (key + T::kKeys < work.key_end) {
        Wait(shared.FullK(k.index), k.parity);
        IssueScores(k.index);
      }
      WgmmaWait<0>();
      HoldRegisters(d_q);
      HoldRegisters(scores);
      HoldRegisters(d_scores);
      Release(shared.EmptyK(now));
    }
  }

  __device__ __forceinline__ void Run() {
    const Problem& p = params.pass.attention.problem;
    if (work.key_begin < work.key_end) {
      const int64_t term = TermIndex(p, work.s, work.b, work.head, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Terms end with the tensor's rows, so check before reading.
        const bool exists = row + 8 * r < work.band.q_len;
        lse2[r] = exists ? params.pass.lse[term + row + 8 * r] : INFINITY;
        less[r] = exists ? params.pass.less[term + row + 8 * r] : 0.0f;
        shifts[RowOfThread(64 * group) + 8 * r] =
            exists ? params.pass.shift[term + row + 8 * r] : 0.0f;
      }
      Accumulate();
    } else {
#pragma unroll
      for (float& x : d_q) x = 0.0f;
    }
    Store();
  }

  __device__ __forceinline__ void Store() const {
    const Problem& p = params.pass.attention.problem;
    const TensorView& to = params.pass.gradients.d_q;
    const QueriesWork at = QueriesWork::Of(params, T{});
    uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : at.b) * to.stride_b +
                           at.head * to.stride_h + at.s.q_row * to.stride_l;
    if (StoreRows<T::kD, kBfloat16, true>(d_q, p.scale, data, to.stride_l,
                                          RowOfThread(at.row + 64 * group), at.band.q_len,
                                          static_cast<int>(at.s.q_rows), static_cast<int>(p.dim))) {
      params.pass.flags->redo = 1;
    }
  }
};

template <class T, class Class, int kCount>
__global__ void __launch_bounds__(kThreads, 1)
    QueriesSm90(const __grid_constant__ LaunchList<Sm90Params, kCount> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const QueriesShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  const Sm90Params& params = list.Of(blockIdx.x);
  const QueriesWork work = QueriesWork::Of(params, T{});
  __shared__ bool shifted;
  __shared__ float shifts[T::kRows];
  if (threadIdx.x == 0) {
    shifted = params.pass.flags->shifted != 0;
    shared.Init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ReleaseRegisters<kProducerRegisters>();
    if (warp == 0 && work.key_begin < work.key_end) {
      QueriesProducer<T> producer{params, work, shared, static_cast<int>(threadIdx.x % 32)};
      producer.Run();
    }
  } else {
    TakeRegisters<kConsumerRegisters>();
    QueriesConsumer<T, Class> consumer(params, work, shared, shifted, shifts, warp / 4 - 1);
    consumer.Run();
  }
#endif
}

}  // namespace attend::cuda::backward
