// SPDX-License-Identifier: Apache-2.0
//
// dQ, dK and dV by one kernel: its consumers, and the kernel. Scores and dP are computed
// transposed, keys down, so that P and dS leave one product as the register operand of the next; dS
// also goes to shared memory, because dQ needs both consumers'. dQ runs one step behind, so that
// neither consumer waits for the other. A step:
//
//   Tensor Cores | scores, dP       | the last dQ, dV += P dO, dK += dS Q  |
//   warpgroup    | hands dQ over, P | dS ...                               |
//
// where the other consumer's products overlap with this one's arithmetic.

#pragma once

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

__device__ __forceinline__ void StoreShared4(uint32_t to, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

template <class T, bool kBfloat16>
struct TurnsConsumer {
  static constexpr int kPairs = T::kRows / 2;  // per thread: two keys, 8 apart

  const Sm90Params& params;
  const TurnsPlace& place;
  const TurnsWork& work;
  const TurnsShared<T> shared;
  const int group;  // warpgroup
  const int slot;   // of the keys
  Stage<T::kStages>& stage;
  float to_log2;
  float scores[kPairs], d_weights[kPairs];
  float d_v[T::kD / 2], d_k[T::kD / 2], d_q[32];
  uint32_t weights[kPairs / 2], d_scores[kPairs / 2];

  // `part`: the warpgroup.
  __device__ __forceinline__ void IssueScores(int stage, int part) {
    IssueAlong<T::kRows, T::kD, kBfloat16>(scores, shared.K(slot) + part * 64 * kRowBytes,
                                           T::Keys::kBoxBytes, shared.Q(stage), T::Rows::kBoxBytes);
  }
  __device__ __forceinline__ void IssueDWeights(int stage, int part) {
    IssueAlong<T::kRows, T::kD, kBfloat16>(d_weights, shared.V() + part * 64 * kRowBytes,
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
    const auto right = SmemTile<kCols>::DownRows(shared.K(slot) + col, T::Keys::kBoxBytes);
#pragma unroll
    for (int n = 0; n < T::kKeys / 16; ++n) {
      Wgmma<64, kBfloat16>::template Shared<true>(
          d_q, left.At(n / 4 * T::Scores::kBoxBytes + n % 4 * 32), right.At(16 * kRowBytes * n),
          n > 0);
    }
  }

  // This thread's first; the second is 8 further. Not kept, as registers are few.
  __device__ __forceinline__ int Key() const { return RowOfThread(work.key + 64 * group); }

  // Hides pairs that do not see each other.
  __device__ __forceinline__ void MaskScores(int row) {
    const int key = Key();
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

  // Hands the consumer's half to its keeper, in accumulator order, which is also the sums' layout.
  // `stage`: of the half's step.
  __device__ __forceinline__ void AddQueries(int stage) {
    static_assert(T::kStages == 2);
    Wait(shared.EmptySums(group), stage ^ 1);
    const uint32_t to = shared.Sums(group) + 16 * (threadIdx.x % 128);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (HasColumns(n)) StoreShared4(to + 2048 * n, d_q + 4 * n);
    }
    FenceAsyncProxy();
    __syncwarp();
    Release(shared.FullSums(group));
  }

  // dQ of a work's last two steps, or of its only one.
  __device__ __forceinline__ void AddLastQueries(const Stage<T::kStages>& last, bool two) {
    if (two) AddQueries(stage.index);
    Wait(shared.FullScores(last.index), last.parity);
    WgmmaFence();
    IssueQueries(last.index);
    WgmmaCommit();
    WgmmaWait<0>();
    HoldRegisters(d_q);
    Release(shared.EmptyScores(last.index));
    Release(shared.EmptyK(slot));
    AddQueries(last.index);
  }

  __device__ __forceinline__ void Accumulate() {
    int left = work.template Steps<T>(params);
    Stage<T::kStages> last;
    int row = work.row_end - T::kRows;
    Wait(shared.FullK(slot), place.KeyParity<T>());
    Wait(shared.FullQ(stage.index), stage.parity);
    int first = group;
    asm volatile("" : "+r"(first));  // opaque: the loop's addresses would occupy registers
    DropRegisters(scores);
    DropRegisters(d_weights);
    DropRegisters(d_q);
    WgmmaFence();
    IssueScores(stage.index, first);
    WgmmaCommit();
    Wait(shared.FullV(), place.loads % 2);
    Wait(shared.FullO(stage.index), stage.parity);
    WgmmaFence();
    IssueDWeights(stage.index, first);
    WgmmaCommit();
    bool later = false;  // than the first step
    for (;; later = true) {
      const int now = stage.index;
      WgmmaWait<1>();
      HoldRegisters(scores);
      Exponentiate(row, shared.Terms(now));
      WgmmaWait<0>();
      HoldRegisters(d_weights);
      if (--left == 0) Release(shared.EmptyV());
      Differentiate(shared.Terms(now));
      DropRegisters(scores);
      DropRegisters(d_weights);
      DropRegisters(d_q);
      Wait(shared.EmptyScores(now), stage.parity ^ 1);
      ShareScores(now);
      if (later) Wait(shared.FullScores(last.index), last.parity);
      // The first step's result is discarded, but keeps the number of products in flight the same.
      WgmmaFence();
      IssueQueries(last.index);
      IssueKeys(now, later);
      WgmmaCommit();
      WgmmaWait<0>();
      HoldRegisters(d_q);
      HoldRegisters(d_v);
      HoldRegisters(d_k);
      HoldRegisters(weights);
      HoldRegisters(d_scores);
      Release(shared.EmptyO(now));
      Release(shared.EmptyQ(now));
      if (later) Release(shared.EmptyScores(last.index));
      last = stage;
      stage.Step();
      if (left == 0) break;
      Wait(shared.FullQ(stage.index), stage.parity);
      WgmmaFence();
      IssueScores(stage.index, group);
      WgmmaCommit();
      if (later) AddQueries(stage.index);
      Wait(shared.FullO(stage.index), stage.parity);
      WgmmaFence();
      IssueDWeights(stage.index, group);
      WgmmaCommit();
      row -= T::kRows;
      if (row < work.row_begin) row = work.row_end - T::kRows;
    }
    AddLastQueries(last, later);
  }

  __device__ __forceinline__ bool Store(const TensorView& to, const float (&sums)[T::kD / 2],
                                        float factor, int dim) {
    if (to.data == nullptr) return false;
    const Problem& p = params.pass.attention.problem;
    uint16_t* const data = static_cast<uint16_t*>(to.data) + (p.packed ? 0 : work.b) * to.stride_b +
                           work.kv_head * to.stride_h + work.s.k_row * to.stride_l;
    const int count = p.packed ? work.band.k_len : static_cast<int>(p.len_k);
    return StoreRows<T::kD, kBfloat16, true>(sums, factor, data, to.stride_l, Key(),
                                             work.band.k_len, count, dim);
  }

  __device__ __forceinline__ void Run() {
    const Problem& p = params.pass.attention.problem;
    to_log2 = p.scale * kLog2E;
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

// Deadlock-free: works wait only for others with lower numbers (TurnsWork::Set). Blocks take
// numbers as they come to them, in ascending order, and run to completion. So of all unfinished
// works the lowest-numbered one waits for none.
template <class T, bool kBfloat16, int kCount>
__global__ void __launch_bounds__(kThreads, 1)
    TurnsSm90(const __grid_constant__ LaunchList<Sm90Params, kCount> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  // Not in registers: the consumers have none to spare.
  __shared__ alignas(TurnsPlace) char storage[kWorks * sizeof(TurnsPlace)];
  __shared__ uint32_t tail_parity;
  const auto places = reinterpret_cast<TurnsPlace*>(storage);
  const TurnsShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    shared.Init();
    places[kWorks - 1].Begin();
    tail_parity = 0;
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ReleaseRegisters<kHelperRegisters>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      ProduceTurns<T>(list, places, shared, tail_parity);
    } else if (threadIdx.x % 32 != 0) {
      return;
    } else if (warp <= kConsumers) {
      KeepTurns<T>(list, places, shared, warp - 1);
    } else {
      TakeTurns<T>(list, places, shared);
    }
  } else {
    TakeRegisters<kTurnsRegisters>();
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128 - 1, 0);
    Stage<T::kStages> stage;
#pragma unroll 1
    for (int nth = 0;; ++nth) {
      Wait(shared.FullWork(nth % kWorks), nth / kWorks % 2);
      const TurnsPlace& place = places[nth % kWorks];
      if (place.item < 0) return;
      TurnsConsumer<T, kBfloat16> consumer{place.Item(list),   place, place.work, shared, group,
                                           place.KeySlot<T>(), stage};
      consumer.Run();
      __syncwarp();  // lanes may still be reading `place`
      Release(shared.EmptyWork(nth % kWorks));
    }
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
