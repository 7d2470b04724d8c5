// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV by one kernel: its consumers, and the kernel. Scores and dP are computed
// transposed, keys down, so that P and dS leave one product as the register operand of the next; dS
// also goes to shared memory, because dQ needs both consumers'. dQ runs one step behind, so that
// neither consumer waits for the other. A step:
//
//   Tensor Cores | scores, dP | the last step's dQ, dV += P dO, dK += dS Q |
//   warpgroup    | adds dQ, P | dS ...                                     |
//
// where the other consumer's products overlap with this one's arithmetic.

#pragma once

#include <new>

#include "kernels/cuda/backward/sm90_turns_helpers.cuh"

namespace attend::cuda::backward {

// stmatrix with each 8 x 8 matrix transposed: lane 8 * m + i passes the address of column i of
// matrix m.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t shared, const uint32_t* x) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}

// Marks the registers as dead, so that they are free until a product overwrites them.
template <int kCount>
__device__ __forceinline__ void DropRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "=f"(d[n]));
}

__device__ __forceinline__ void StoreFour(float* to, const float* x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ __forceinline__ void AddFour(float* to, const float* x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

template <class T, bool kBfloat16>
struct TurnsConsumer {
  static constexpr int kPairs = T::kRows / 2;  // per thread: two keys, 8 apart

  const Sm90Params& params;
  const TurnsWork& work;
  const TurnsShared<T> shared;
  const int group;  // warpgroup
  float to_log2;
  int key;  // this thread's first; the second is key + 8
  uint32_t turn_parity = 0;
  float scores[kPairs], d_weights[kPairs];
  float d_v[T::kD / 2], d_k[T::kD / 2], d_q[32];
  uint32_t weights[kPairs / 2], d_scores[kPairs / 2];

  __device__ __forceinline__ void IssueScores(int stage) {
    IssueAlong<T::kRows, T::kD, kBfloat16>(scores, shared.K() + group * 64 * kRowBytes,
                                           T::Keys::kBoxBytes, shared.Q(stage), T::Rows::kBoxBytes);
  }
  __device__ __forceinline__ void IssueDWeights(int stage) {
    IssueAlong<T::kRows, T::kD, kBfloat16>(d_weights, shared.V() + group * 64 * kRowBytes,
                                           T::Keys::kBoxBytes, shared.O(stage), T::Rows::kBoxBytes);
  }
  __device__ __forceinline__ void IssueKeys(int stage, bool accumulate) {
    IssueDown<T::kRows, T::kD, kBfloat16>(d_v, weights, shared.O(stage), T::Rows::kBoxBytes,
                                          accumulate);
    IssueDown<T::kRows, T::kD, kBfloat16>(d_k, d_scores, shared.Q(stage), T::Rows::kBoxBytes,
                                          accumulate);
  }
  // This consumer's half of dQ: rows if a tile has 128, else columns.
  __device__ __forceinline__ void IssueQueries(int stage) {
    const int row = T::kRows > 64 ? group * 64 * kRowBytes : 0;
    const int col = T::kRows > 64 ? 0 : group * T::Keys::kBoxBytes;
    const auto left = SmemTile<kCols>::AlongRows(shared.Scores(stage) + row);
    const auto right = SmemTile<kCols>::DownRows(shared.K() + col, T::Keys::kBoxBytes);
#pragma unroll
    for (int n = 0; n < T::kKeys / 16; ++n) {
      Wgmma<64, kBfloat16>::template Shared<true>(
          d_q, left.At(n / 4 * T::Scores::kBoxBytes + n % 4 * 32), right.At(16 * kRowBytes * n),
          n > 0);
    }
  }

  // Hides pairs that do not see each other.
  __device__ __forceinline__ void MaskScores(int row) {
    const int first = row + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = key + 8 * r < work.band.k_len;
      const int begin = work.band.RowBegin(key + 8 * r) - first;
      const int end = exists ? work.band.RowEnd(key + 8 * r) - first : -1;
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
    if (row < work.band.RowBegin(first_key + 63) || row + T::kRows > work.band.RowEnd(first_key) ||
        first_key + 64 > work.whole_end) {
      if (work.shifted) ShiftScores(scores, terms + 8 * T::kRows);
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

  // Stores dS, rows down, with this consumer's keys along them.
  __device__ __forceinline__ void ShareScores(int stage) {
    const int lane = threadIdx.x % 32;
    const int chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
    const uint32_t to = shared.Scores(stage) + group * T::Scores::kBoxBytes +
                        (lane / 16 * 8 + lane % 8) * kRowBytes + 16 * (chunk ^ lane % 8);
#pragma unroll
    for (int j = 0; j < T::kRows / 8; j += 2) {
      StoreMatricesTransposed(to + j * 8 * kRowBytes, d_scores + 2 * j);
    }
    FenceAsyncProxy();
    __syncwarp();
    Release(shared.FullScores(stage));
  }

  // Whether the nth eight columns of this consumer's half exist.
  __device__ __forceinline__ bool HasColumns(int n) const {
    return T::kD != 96 || group == 0 || n < 4;
  }

  // In accumulator order, which is also the sums' layout. The first block of a tile stores instead
  // of adding.
  __device__ __forceinline__ void AddQueries() {
    Wait(shared.Turn(group), turn_parity);
    turn_parity ^= 1;
    float* to;
    uint32_t earlier;
    asm volatile("ld.shared.b64 %0, [%2]; ld.shared.u32 %1, [%2 + 8];"
                 : "=l"(to), "=r"(earlier)
                 : "r"(shared.Place(group))
                 : "memory");
    to += 4 * (threadIdx.x % 128);
    if (earlier == 0) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (HasColumns(n)) StoreFour(to + 512 * n, d_q + 4 * n);
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (HasColumns(n)) AddFour(to + 512 * n, d_q + 4 * n);
      }
    }
    __syncwarp();
    Release(shared.Added(group));
  }

  __device__ __forceinline__ void Accumulate() {
    const int steps = work.template Steps<T>(params.pass.attention.problem);
    Stage<T::kStages> stage;
    Stage<T::kStages> last;
    int row = work.row_end - T::kRows;
    Wait(shared.FullK(), 0);
    Wait(shared.FullQ(0), 0);
    DropRegisters(scores);
    DropRegisters(d_weights);
    DropRegisters(d_q);
    WgmmaFence();
    IssueScores(0);
    WgmmaCommit();
    Wait(shared.FullV(), 0);
    Wait(shared.FullO(0), 0);
    WgmmaFence();
    IssueDWeights(0);
    WgmmaCommit();
    for (int n = 0;; ++n) {
      const int now = stage.index;
      WgmmaWait<1>();
      HoldRegisters(scores);
      Exponentiate(row, shared.Terms(now));
      WgmmaWait<0>();
      HoldRegisters(d_weights);
      Differentiate(shared.Terms(now));
      DropRegisters(scores);
      DropRegisters(d_weights);
      DropRegisters(d_q);
      Wait(shared.EmptyScores(now), stage.parity ^ 1);
      ShareScores(now);
      if (n > 0) Wait(shared.FullScores(last.index), last.parity);
      // The first step's result is discarded, but keeps the number of products in flight the same.
      WgmmaFence();
      IssueQueries(last.index);
      IssueKeys(now, n > 0);
      WgmmaCommit();
      WgmmaWait<0>();
      HoldRegisters(d_q);
      HoldRegisters(d_v);
      HoldRegisters(d_k);
      HoldRegisters(weights);
      HoldRegisters(d_scores);
      Release(shared.EmptyO(now));
      Release(shared.EmptyQ(now));
      if (n > 0) Release(shared.EmptyScores(last.index));
      last = stage;
      stage.Step();
      if (n + 1 == steps) break;
      Wait(shared.FullQ(stage.index), stage.parity);
      WgmmaFence();
      IssueScores(stage.index);
      WgmmaCommit();
      if (n > 0) AddQueries();
      Wait(shared.FullO(stage.index), stage.parity);
      WgmmaFence();
      IssueDWeights(stage.index);
      WgmmaCommit();
      row -= T::kRows;
      if (row < work.row_begin) row = work.row_end - T::kRows;
    }
    if (steps > 1) AddQueries();
    Wait(shared.FullScores(last.index), last.parity);
    WgmmaFence();
    IssueQueries(last.index);
    WgmmaCommit();
    WgmmaWait<0>();
    HoldRegisters(d_q);
    AddQueries();
  }

  __device__ __forceinline__ bool Store(const TensorView& to, const float (&sums)[T::kD / 2],
                                        float factor, int dim) {
    if (to.data == nullptr) return false;
    const Problem& p = params.pass.attention.problem;
    uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : work.b) * to.stride_b +
                           work.kv_head * to.stride_h + work.s.k_row * to.stride_l;
    const int count = p.packed ? work.band.k_len : static_cast<int>(p.len_k);
    return StoreRows<T::kD, kBfloat16, true>(sums, factor, data, to.stride_l, key, work.band.k_len,
                                             count, dim);
  }

  __device__ __forceinline__ void Run() {
    const Problem& p = params.pass.attention.problem;
    to_log2 = p.scale * kLog2E;
    key = RowOfThread(work.key + 64 * group);
    if (!work.Empty()) {
      Accumulate();
    } else {
#pragma unroll
      for (int n = 0; n < T::kD / 2; ++n) d_k[n] = d_v[n] = 0.0f;
    }
    const bool in_v = Store(params.pass.gradients.d_v, d_v, 1.0f, static_cast<int>(p.dim_v));
    const bool in_k = Store(params.pass.gradients.d_k, d_k, p.scale, static_cast<int>(p.dim));
    if (in_v || in_k) params.pass.flags->redo = 1;
  }
};

// Deadlock-free: a block waits only for blocks of earlier keys of the same head, which have lower
// numbers (TurnsWork::Of); numbers are assigned as blocks start, and blocks run to completion. So
// of all unfinished blocks the lowest-numbered one waits for none.
template <class T, bool kBfloat16, int kCount>
__global__ void __launch_bounds__(kThreads, 1)
    TurnsSm90(const __grid_constant__ LaunchList<Sm90Params, kCount> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  // Not in registers: the consumers have none to spare.
  __shared__ alignas(TurnsWork) char place[sizeof(TurnsWork)];
  __shared__ int index;
  const TurnsShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    const uint32_t number = atomicAdd(&list.items[0].pass.flags->begun, 1);
    shared.Init();
    index = list.Index(number);
    const BackwardPass& pass = list.items[index].pass;
    new (place) TurnsWork(TurnsWork::Of(pass, static_cast<int>(number - pass.first_block), T{}));
  }
  __syncthreads();
  const TurnsWork& work = *reinterpret_cast<const TurnsWork*>(place);
  const Sm90Params& params = list.items[kCount == 1 ? 0 : index];
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ReleaseRegisters<kHelperRegisters>();
    if (work.Empty()) return;
    if (warp == 0) {
      TurnsProducer<T> producer{params, work, shared, static_cast<int>(threadIdx.x % 32)};
      producer.Run();
    } else if (warp <= kConsumers && threadIdx.x % 32 == 0) {
      TurnsKeeper<T> keeper{params.pass, work, shared, warp - 1};
      keeper.Run();
    }
  } else {
    TakeRegisters<kTurnsRegisters>();
    TurnsConsumer<T, kBfloat16> consumer{params, work, shared, warp / 4 - 1};
    consumer.Run();
  }
#endif
}

// Converts dQ from its sums; 0 for rows that see no key. One block per tile, one warpgroup per
// half.
template <class T, bool kBfloat16, int kCount>
__global__ void __launch_bounds__(128 * kConsumers)
    NarrowQueries(const __grid_constant__ LaunchList<PassItem, kCount> list) {
  const BackwardPass& pass = list.Of(blockIdx.x).pass;
  const uint32_t block = blockIdx.x - pass.first_block;
  const Problem& p = pass.attention.problem;
  const int64_t heads = p.heads_q * p.batch;
  const int64_t head = block % heads % p.heads_q;
  const int64_t b = block % heads / p.heads_q;
  const int row = static_cast<int>(block / heads) * T::kRows;
  const Sequence s = SequenceOf(pass.attention, b);
  if (row >= s.q_rows) return;
  const Band band(p, s);
  const int half = threadIdx.x / 128;
  const int col = T::kRows > 64 ? 0 : 64 * half;
  if (col >= p.dim) return;
  float sums[32] = {};
  const int last = min(row + T::kRows, band.q_len) - 1;
  if (row <= last && band.KeyBegin(row) < band.KeyEnd(last)) {
    const int64_t tile = TurnTile(p, s, b, head, row);
    const auto* from = reinterpret_cast<const float4*>(pass.sums) +
                       (2 * tile + half) * (kTurnHalfFloats / 4) + threadIdx.x % 128;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (col + 8 * n >= p.dim) break;
      const float4 x = from[128 * n];
      sums[4 * n] = x.x;
      sums[4 * n + 1] = x.y;
      sums[4 * n + 2] = x.z;
      sums[4 * n + 3] = x.w;
    }
  }
  const TensorView& to = pass.gradients.d_q;
  uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : b) * to.stride_b +
                         head * to.stride_h + s.q_row * to.stride_l + col;
  if (StoreRows<64, kBfloat16, true>(sums, p.scale, data, to.stride_l,
                                     RowOfThread(row + (T::kRows > 64 ? 64 * half : 0)), band.q_len,
                                     static_cast<int>(s.q_rows), static_cast<int>(p.dim) - col)) {
    pass.flags->redo = 1;
  }
}

}  // namespace attend::cuda::backward
