// SPDX-License-Identifier: Apache-2.0
//
// dQ by wgmma. A block has 128 query rows of a head, 64 to each consumer, and walks tiles of keys.
// As in the forward pass, rows are down, and what a product leaves is the operand in registers of
// the next. A step:
//
//   Tensor Cores | dP     | dQ += dS K, next scores |
//   warpgroup    | P      | (waits)                 | dS ...

#pragma once

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

template <int kHeadDim, int kKeyStages>
struct QueriesTile {
  static constexpr int kD = kHeadDim;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = kKeyBox;  // of a step
  static constexpr int kStages = kKeyStages;
  using Rows = BoxedTile<kRows, kD>;
  using Keys = BoxedTile<kKeys, kD>;
  static constexpr int kOffsetO = Rows::kBytes;
  static constexpr int kOffsetK = 2 * Rows::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStages * Keys::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + kStages * Keys::kBytes;
  static constexpr int kSharedBytes = 1024 + kOffsetBarriers + 8 * (2 + 4 * kStages);
  static_assert(kSharedBytes <= 227 * 1024);
};

template <class T>
struct QueriesShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t Q() const { return base; }
  __device__ __forceinline__ uint32_t O() const { return base + T::kOffsetO; }
  __device__ __forceinline__ uint32_t K(int n) const {
    return base + T::kOffsetK + n * T::Keys::kBytes;
  }
  __device__ __forceinline__ uint32_t V(int n) const {
    return base + T::kOffsetV + n * T::Keys::kBytes;
  }
  __device__ __forceinline__ uint32_t Barriers(int n) const {
    return base + T::kOffsetBarriers + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullRows() const { return Barriers(0); }
  __device__ __forceinline__ uint32_t Tail() const { return Barriers(1); }
  __device__ __forceinline__ uint32_t FullK(int n) const { return Barriers(2 + n); }
  __device__ __forceinline__ uint32_t FullV(int n) const { return Barriers(2 + T::kStages + n); }
  __device__ __forceinline__ uint32_t EmptyK(int n) const {
    return Barriers(2 + 2 * T::kStages + n);
  }
  __device__ __forceinline__ uint32_t EmptyV(int n) const {
    return Barriers(2 + 3 * T::kStages + n);
  }
};

// What the block computes.
struct QueriesWork {
  int64_t b, head;
  Sequence s;
  Band band;
  int row;                 // first
  int key_begin, key_end;  // of tiles of keys that some row sees

  // The last rows first: under a causal mask they have the most keys.
  template <class T>
  static __device__ __forceinline__ QueriesWork Of(const Attention& a, T) {
    const Problem& p = a.problem;
    const int64_t heads = p.heads_q * p.batch;
    const int64_t head = blockIdx.x % heads;
    const int64_t b = head / p.heads_q;
    const int64_t tiles = (p.len_q + T::kRows - 1) / T::kRows;
    const Sequence s = SequenceOf(a, b);
    QueriesWork work{b,
                     head % p.heads_q,
                     s,
                     Band(p, s),
                     static_cast<int>(tiles - 1 - blockIdx.x / heads) * T::kRows,
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

  // A tile of K or V. Keys beyond the length may be another sequence's, or hold anything.
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
      ArriveExpecting(barrier, T::Keys::kBytes);
#pragma unroll
      for (int n = 0; n < T::Keys::kBoxes; ++n) {
        LoadBox(map, to + n * T::Keys::kBoxBytes, barrier, n * kCols,
                static_cast<int>(work.s.k_row) + key, BroadcastIndex(view.stride_h, head),
                BroadcastIndex(view.stride_b, a.problem.packed ? 0 : work.b),
                CachePolicy::kEvictLast);
      }
    }
    if (!patch) return;
    Wait(shared.Tail(), tail_parity);
    tail_parity ^= 1;
    PatchRows<T::kKeys, T::kD>(to, work.band.k_len - key, lane);
    FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) Arrive(full);
  }

  __device__ __forceinline__ void LoadRows(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to) {
    const int batch = params.pass.attention.problem.packed ? 0 : static_cast<int>(work.b);
#pragma unroll
    for (int n = 0; n < T::Rows::kBoxes; ++n) {
#pragma unroll
      for (int half = 0; half < T::kRows; half += kQueryBox) {
        LoadBox(map, to + n * T::Rows::kBoxBytes + half * kRowBytes, shared.FullRows(), n * kCols,
                static_cast<int>(work.s.q_row) + work.row + half,
                BroadcastIndex(view.stride_h, static_cast<int>(work.head)),
                BroadcastIndex(view.stride_b, batch), CachePolicy::kEvictFirst);
      }
    }
  }

  __device__ __forceinline__ void Run() {
    const BackwardPass& pass = params.pass;
    if (lane == 0) {
      ArriveExpecting(shared.FullRows(), 2 * T::Rows::kBytes);
      LoadRows(&params.maps.q, pass.attention.q, shared.Q());
      LoadRows(&params.maps.o, pass.gradients.d_o, shared.O());
    }
    Stage<T::kStages> stage;
    for (int key = work.key_begin; key < work.key_end; key += T::kKeys) {
      LoadKeys(&params.maps.k, pass.attention.k, shared.K(stage.index), shared.EmptyK(stage.index),
               stage.parity, shared.FullK(stage.index), key);
      LoadKeys(&params.maps.v, pass.attention.v, shared.V(stage.index), shared.EmptyV(stage.index),
               stage.parity, shared.FullV(stage.index), key);
      stage.Step();
    }
  }
};

template <class T, bool kBfloat16>
struct QueriesConsumer {
  static constexpr int kPairs = T::kKeys / 2;  // of a thread: two rows, 8 apart

  const Sm90Params& params;
  const QueriesWork& work;
  const QueriesShared<T> shared;
  const int group;  // warpgroup
  float to_log2;
  int row;  // this thread's first; the second is 8 further
  float lse2[2], less[2];
  float scores[kPairs], d_weights[kPairs];
  float d_q[T::kD / 2];
  uint32_t d_scores[kPairs / 2];

  __device__ __forceinline__ void IssueScores(int stage) {
    WgmmaFence();
    IssueAlong<T::kKeys, T::kD, kBfloat16>(scores, shared.Q() + group * 64 * kRowBytes,
                                           T::Rows::kBoxBytes, shared.K(stage), T::Keys::kBoxBytes);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueDWeights(int stage) {
    WgmmaFence();
    IssueAlong<T::kKeys, T::kD, kBfloat16>(d_weights, shared.O() + group * 64 * kRowBytes,
                                           T::Rows::kBoxBytes, shared.V(stage), T::Keys::kBoxBytes);
    WgmmaCommit();
  }

  __device__ __forceinline__ void MaskScores(int key) {
    const int first = key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = work.band.KeyBegin(row + 8 * r) - first;
      const int end = work.band.KeyEnd(row + 8 * r) - first;
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

  __device__ __forceinline__ void Exponentiate(int key) {
    const int first_row = work.row + 64 * group;
    if (key < work.band.KeyBegin(first_row + 63) || key + T::kKeys > work.band.KeyEnd(first_row)) {
      MaskScores(key);
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      scores[n] = FastExp2(fmaf(scores[n], to_log2, -lse2[n / 2 % 2]));
    }
  }

  __device__ __forceinline__ void Differentiate() {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      d_weights[n] = scores[n] * (d_weights[n] - less[n / 2 % 2]);
    }
    PackAll<kBfloat16>(d_weights, d_scores);
  }

  __device__ __forceinline__ void Release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0) Arrive(barrier);
  }

  __device__ __forceinline__ void Accumulate() {
    Stage<T::kStages> stage;
    Wait(shared.FullRows(), 0);
    Wait(shared.FullK(0), 0);
    IssueScores(0);
    WgmmaWait<0>();
    HoldRegisters(scores);
    bool accumulate = false;
    for (int key = work.key_begin; key < work.key_end; key += T::kKeys) {
      const int now = stage.index;
      Wait(shared.FullV(now), stage.parity);
      IssueDWeights(now);
      Exponentiate(key);
      WgmmaWait<0>();
      HoldRegisters(d_weights);
      Release(shared.EmptyV(now));
      Differentiate();
      WgmmaFence();
      IssueDown<T::kKeys, T::kD, kBfloat16>(d_q, d_scores, shared.K(now), T::Keys::kBoxBytes,
                                            accumulate);
      WgmmaCommit();
      accumulate = true;
      stage.Step();
      if (key + T::kKeys < work.key_end) {
        Wait(shared.FullK(stage.index), stage.parity);
        IssueScores(stage.index);
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
    to_log2 = p.scale * kLog2E;
    row = work.row + 64 * group + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    if (work.key_begin < work.key_end) {
      const int64_t term = TermIndex(p, work.s, work.b, work.head, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // What is beyond the rows of the terms is beyond those of the tensor.
        const bool exists = row + 8 * r < work.band.q_len;
        lse2[r] = exists ? params.pass.lse[term + row + 8 * r] : INFINITY;
        less[r] = exists ? params.pass.less[term + row + 8 * r] : 0.0f;
      }
      Accumulate();
    } else {
#pragma unroll
      for (int n = 0; n < T::kD / 2; ++n) d_q[n] = 0.0f;
    }
    const TensorView& to = params.pass.gradients.d_q;
    uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : work.b) * to.stride_b +
                           work.head * to.stride_h + work.s.q_row * to.stride_l;
    if (StoreRows<T::kD, kBfloat16>(d_q, p.scale, data, to.stride_l, row, work.band.q_len,
                                    static_cast<int>(work.s.q_rows), static_cast<int>(p.dim))) {
      *params.pass.redo = 1;
    }
  }
};

template <class T, bool kBfloat16>
__global__ void __launch_bounds__(kThreads, 1)
    QueriesSm90(const __grid_constant__ Sm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const QueriesShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  const QueriesWork work = QueriesWork::Of(params.pass.attention, T{});
  if (threadIdx.x == 0) {
    InitBarrier(shared.FullRows(), 1);
    InitBarrier(shared.Tail(), 1);
    for (int n = 0; n < T::kStages; ++n) {
      InitBarrier(shared.FullK(n), 1);
      InitBarrier(shared.FullV(n), 1);
      InitBarrier(shared.EmptyK(n), 4 * kConsumers);
      InitBarrier(shared.EmptyV(n), 4 * kConsumers);
    }
    FenceBarrierInit();
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
    QueriesConsumer<T, kBfloat16> consumer{params, work, shared, warp / 4 - 1};
    consumer.Run();
  }
#endif
}

}  // namespace attend::cuda::backward
