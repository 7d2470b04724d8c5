// SPDX-License-Identifier: Apache-2.0
//
// dK and dV by wgmma. A block has 128 keys of a KV head, 64 to each consumer, and walks tiles of
// query rows of all the group's heads. Scores and dP are computed transposed, keys down, so that P
// and dS come out of one product as the operand in registers of the next. A step:
//
//   Tensor Cores | dP     | dV += P dO, dK += dS Q, next scores |
//   warpgroup    | P      | (waits)                             | dS ...
//
// and the other consumer's products run under what this one computes.

#pragma once

#include "kernels/cuda/backward/sm90_tile.cuh"

namespace attend::cuda::backward {

template <int kHeadDim, int kQueryRows, int kQueryStages>
struct KeysTile {
  static constexpr int kD = kHeadDim;
  static constexpr int kRows = kQueryRows;  // of a step
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kStages = kQueryStages;
  using Keys = BoxedTile<kKeys, kD>;
  using Rows = BoxedTile<kRows, kD>;
  static constexpr int kOffsetV = Keys::kBytes;
  static constexpr int kOffsetQ = 2 * Keys::kBytes;
  static constexpr int kOffsetO = kOffsetQ + kStages * Rows::kBytes;
  static constexpr int kOffsetTerms = kOffsetO + kStages * Rows::kBytes;
  static constexpr int kTermBytes = 2 * kRows * static_cast<int>(sizeof(float));  // LSE, less
  static constexpr int kOffsetBarriers = kOffsetTerms + kStages * kTermBytes;
  static constexpr int kSharedBytes = 1024 + kOffsetBarriers + 8 * (2 + 4 * kStages);
  static_assert(kRows % kQueryBox == 0 && kKeys == kKeyBox && kSharedBytes <= 227 * 1024);
};

template <class T>
struct KeysShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t K() const { return base; }
  __device__ __forceinline__ uint32_t V() const { return base + T::kOffsetV; }
  __device__ __forceinline__ uint32_t Q(int n) const {
    return base + T::kOffsetQ + n * T::Rows::kBytes;
  }
  __device__ __forceinline__ uint32_t O(int n) const {
    return base + T::kOffsetO + n * T::Rows::kBytes;
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
};

// What the block computes.
struct KeysWork {
  int64_t b, kv_head;
  Sequence s;
  Band band;
  int key;                 // first
  int row_begin, row_end;  // of tiles of rows that some key sees

  template <class T>
  static __device__ __forceinline__ KeysWork Of(const Attention& a, T) {
    const Problem& p = a.problem;
    const int64_t heads = p.heads_kv * p.batch;
    const int64_t head = blockIdx.x % heads;
    const int64_t b = head / p.heads_kv;
    const Sequence s = SequenceOf(a, b);
    KeysWork work{
        b, head % p.heads_kv, s, Band(p, s), static_cast<int>(blockIdx.x / heads) * T::kKeys, 0, 0};
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
  uint32_t tail_parity = 0;

  // A tile of Q or dO. Rows beyond the length may be another sequence's, or hold anything.
  __device__ __forceinline__ void LoadRows(const CUtensorMap* map, const ConstTensorView& view,
                                           uint32_t to, uint32_t empty, uint32_t parity,
                                           uint32_t full, int head, int row, uint32_t terms,
                                           int64_t term) {
    const bool patch =
        row + T::kRows > work.band.q_len &&
        (params.pass.attention.problem.packed || params.pass.attention.q_lengths != nullptr);
    if (lane == 0) {
      Wait(empty, parity ^ 1);
      const uint32_t barrier = patch ? shared.Tail() : full;
      ArriveExpecting(barrier, T::Rows::kBytes + (terms != 0 ? T::kTermBytes : 0));
#pragma unroll
      for (int n = 0; n < T::Rows::kBoxes; ++n) {
#pragma unroll
        for (int half = 0; half < T::kRows; half += kQueryBox) {
          LoadBox(map, to + n * T::Rows::kBoxBytes + half * kRowBytes, barrier, n * kCols,
                  static_cast<int>(work.s.q_row) + row + half, BroadcastIndex(view.stride_h, head),
                  BroadcastIndex(view.stride_b, params.pass.attention.problem.packed ? 0 : work.b),
                  CachePolicy::kEvictLast);
        }
      }
      if (terms != 0) {
        LoadFloats(params.pass.lse + term, terms, T::kRows, barrier);
        LoadFloats(params.pass.less + term, terms + 4 * T::kRows, T::kRows, barrier);
      }
    }
    if (!patch) return;
    Wait(shared.Tail(), tail_parity);
    tail_parity ^= 1;
    PatchRows<T::kRows, T::kD>(to, max(work.band.q_len - row, 0), lane);
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
    ArriveExpecting(shared.FullKeys(), 2 * T::Keys::kBytes);
#pragma unroll
    for (int n = 0; n < T::Keys::kBoxes; ++n) {
      LoadBox(&params.maps.k, shared.K() + n * T::Keys::kBoxBytes, shared.FullKeys(), n * kCols,
              row, BroadcastIndex(a.k.stride_h, head), BroadcastIndex(a.k.stride_b, batch),
              CachePolicy::kEvictFirst);
      LoadBox(&params.maps.v, shared.V() + n * T::Keys::kBoxBytes, shared.FullKeys(), n * kCols,
              row, BroadcastIndex(a.v.stride_h, head), BroadcastIndex(a.v.stride_b, batch),
              CachePolicy::kEvictFirst);
    }
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
        LoadRows(&params.maps.q, pass.attention.q, shared.Q(stage.index),
                 shared.EmptyQ(stage.index), stage.parity, shared.FullQ(stage.index), head, row,
                 shared.Terms(stage.index), term + row);
        LoadRows(&params.maps.o, pass.gradients.d_o, shared.O(stage.index),
                 shared.EmptyO(stage.index), stage.parity, shared.FullO(stage.index), head, row, 0,
                 0);
        stage.Step();
      }
    }
  }
};

template <class T, bool kBfloat16>
struct KeysConsumer {
  static constexpr int kPairs = T::kRows / 2;  // of a thread: two keys, 8 apart

  const Sm90Params& params;
  const KeysWork& work;
  const KeysShared<T> shared;
  const int group;  // warpgroup
  float to_log2;
  int key;  // this thread's first; the second is 8 further
  float scores[kPairs], d_weights[kPairs];
  float d_v[T::kD / 2], d_k[T::kD / 2];
  uint32_t weights[kPairs / 2], d_scores[kPairs / 2];

  __device__ __forceinline__ void IssueScores(int stage) {
    WgmmaFence();
    IssueAlong<T::kRows, T::kD, kBfloat16>(scores, shared.K() + group * 64 * kRowBytes,
                                           T::Keys::kBoxBytes, shared.Q(stage), T::Rows::kBoxBytes);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueDWeights(int stage) {
    WgmmaFence();
    IssueAlong<T::kRows, T::kD, kBfloat16>(d_weights, shared.V() + group * 64 * kRowBytes,
                                           T::Keys::kBoxBytes, shared.O(stage), T::Rows::kBoxBytes);
    WgmmaCommit();
  }

  // Hides pairs that do not see each other.
  __device__ __forceinline__ void MaskScores(int row) {
    const int first = row + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = work.band.RowBegin(key + 8 * r) - first;
      const int end = work.band.RowEnd(key + 8 * r) - first;
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

  __device__ __forceinline__ void Exponentiate(int row, uint32_t terms) {
    const int first_key = work.key + 64 * group;
    if (row < work.band.RowBegin(first_key + 63) || row + T::kRows > work.band.RowEnd(first_key)) {
      MaskScores(row);
    }
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 lse2 = LoadShared2(terms + 4 * (8 * j + 2 * (threadIdx.x % 4)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[4 * j + i];
        x = FastExp2(fmaf(x, to_log2, i % 2 == 0 ? -lse2.x : -lse2.y));
      }
    }
    PackAll<kBfloat16>(scores, weights);
  }

  __device__ __forceinline__ void Differentiate(uint32_t terms) {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 less = LoadShared2(terms + 4 * (T::kRows + 8 * j + 2 * (threadIdx.x % 4)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = d_weights[4 * j + i];
        x = scores[4 * j + i] * (x - (i % 2 == 0 ? less.x : less.y));
      }
    }
    PackAll<kBfloat16>(d_weights, d_scores);
  }

  __device__ __forceinline__ void IssueKeys(int stage, bool accumulate) {
    WgmmaFence();
    IssueDown<T::kRows, T::kD, kBfloat16>(d_v, weights, shared.O(stage), T::Rows::kBoxBytes,
                                          accumulate);
    IssueDown<T::kRows, T::kD, kBfloat16>(d_k, d_scores, shared.Q(stage), T::Rows::kBoxBytes,
                                          accumulate);
    WgmmaCommit();
  }

  __device__ __forceinline__ void Release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0) Arrive(barrier);
  }

  __device__ __forceinline__ void Accumulate() {
    const auto heads = static_cast<int>(params.pass.attention.problem.group());
    const int tiles = (work.row_end - work.row_begin + T::kRows - 1) / T::kRows;
    Stage<T::kStages> stage;
    int row = work.row_begin;
    Wait(shared.FullKeys(), 0);
    Wait(shared.FullQ(0), 0);
    IssueScores(0);
    WgmmaWait<0>();
    HoldRegisters(scores);
    for (int n = heads * tiles; n > 0; --n) {
      const int now = stage.index;
      Wait(shared.FullO(now), stage.parity);
      IssueDWeights(now);
      Exponentiate(row, shared.Terms(now));
      WgmmaWait<0>();
      HoldRegisters(d_weights);
      Differentiate(shared.Terms(now));
      IssueKeys(now, n < heads * tiles);
      stage.Step();
      if (n > 1) {
        Wait(shared.FullQ(stage.index), stage.parity);
        IssueScores(stage.index);
      }
      WgmmaWait<0>();
      HoldRegisters(d_v);
      HoldRegisters(d_k);
      HoldRegisters(scores);
      HoldRegisters(weights);
      HoldRegisters(d_scores);
      Release(shared.EmptyO(now));
      Release(shared.EmptyQ(now));
      row += T::kRows;
      if (row >= work.row_end) row = work.row_begin;
    }
  }

  __device__ __forceinline__ bool Store(const TensorView& to, const float (&sums)[T::kD / 2],
                                        float factor, int dim) {
    if (to.data == nullptr) return false;
    const Problem& p = params.pass.attention.problem;
    uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : work.b) * to.stride_b +
                           work.kv_head * to.stride_h + work.s.k_row * to.stride_l;
    const int count = p.packed ? work.band.k_len : static_cast<int>(p.len_k);
    return StoreRows<T::kD, kBfloat16>(sums, factor, data, to.stride_l, key, work.band.k_len, count,
                                       dim);
  }

  __device__ __forceinline__ void Run() {
    const Problem& p = params.pass.attention.problem;
    to_log2 = p.scale * kLog2E;
    key = work.key + 64 * group + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    if (work.row_begin < work.row_end) {
      Accumulate();
    } else {
#pragma unroll
      for (int n = 0; n < T::kD / 2; ++n) d_k[n] = d_v[n] = 0.0f;
    }
    const bool in_v = Store(params.pass.gradients.d_v, d_v, 1.0f, static_cast<int>(p.dim_v));
    const bool in_k = Store(params.pass.gradients.d_k, d_k, p.scale, static_cast<int>(p.dim));
    if (in_v || in_k) *params.pass.redo = 1;
  }
};

template <class T, bool kBfloat16>
__global__ void __launch_bounds__(kThreads, 1) KeysSm90(const __grid_constant__ Sm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const KeysShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  const KeysWork work = KeysWork::Of(params.pass.attention, T{});
  if (threadIdx.x == 0) {
    InitBarrier(shared.FullKeys(), 1);
    InitBarrier(shared.Tail(), 1);
    for (int n = 0; n < T::kStages; ++n) {
      InitBarrier(shared.FullQ(n), 1);
      InitBarrier(shared.FullO(n), 1);
      InitBarrier(shared.EmptyQ(n), 4 * kConsumers);
      InitBarrier(shared.EmptyO(n), 4 * kConsumers);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ReleaseRegisters<kProducerRegisters>();
    if (warp == 0 && work.row_begin < work.row_end) {
      KeysProducer<T> producer{params, work, shared, static_cast<int>(threadIdx.x % 32)};
      producer.Run();
    }
  } else {
    TakeRegisters<kConsumerRegisters>();
    KeysConsumer<T, kBfloat16> consumer{params, work, shared, warp / 4 - 1};
    consumer.Run();
  }
#endif
}

}  // namespace attend::cuda::backward
