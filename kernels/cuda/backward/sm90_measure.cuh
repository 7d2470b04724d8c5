// SPDX-License-Identifier: Apache-2.0
//
// Measures rows (measure.cuh) by wgmma, without a cap and dropout: tiles of QueriesSm90
// (sm90_queries.cuh), whose keys a block walks for scores and dP only. Blocks loop over tiles, as
// most launches have nothing to measure. With a single loading warp beside the consumers every
// thread has enough registers without reallocation, so roles may change between tiles. A step:
//
//   Tensor Cores | dP           | next scores |
//   warpgroup    | weights, sum | P dP ...    |

#pragma once

#include <new>

#include "kernels/cuda/backward/measure.cuh"
#include "kernels/cuda/backward/sm90_queries.cuh"

namespace attend::cuda::backward {

inline constexpr int kMeasureThreads = 128 * kConsumers + 32;

__device__ __forceinline__ void EndBarrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

template <class T, class Class>
struct MeasureConsumer : QueriesConsumer<T, Class> {
  using Queries = QueriesConsumer<T, Class>;
  using Queries::kPairs;
  const float unit;  // log2 of the weight per unit of score; positive
  const float sign;  // of raw scores relative to it
  RowMeasure rows[2] = {};

  // The base class does not need shifts here.
  __device__ __forceinline__ MeasureConsumer(const Sm90Params& params, const QueriesWork& work,
                                             const QueriesShared<T>& shared, const bool& shifted,
                                             float (&shifts)[T::kRows], int group)
      : Queries(params, work, shared, shifted, shifts, group),
        // A scale of 0 becomes the smallest subnormal: products with it are 0, but -inf is kept.
        unit(fmaxf(fabsf(this->rule.to_log2), 0x1p-149f)),
        sign(this->rule.to_log2 < 0.0f ? -1.0f : 1.0f) {}

  __device__ __forceinline__ bool HasHidden(int key) const {
    const Band& band = this->work.band;
    return key < band.KeyBegin(this->first_row + 63) ||
           key + T::kKeys > band.KeyEnd(this->first_row);
  }

  // Turns scores into weights relative to the row's largest score so far.
  __device__ __forceinline__ void Weigh(int key, bool hidden) {
    float(&scores)[kPairs] = this->scores;
    if (sign < 0.0f) {
#pragma unroll
      for (float& x : scores) x = -x;
    }
    if (hidden) this->MaskScores(key);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = NegativeInfinity();
#pragma unroll
      for (int n = 0; n < kPairs / 2; ++n) most = fmaxf(most, scores[n / 2 * 4 + 2 * r + n % 2]);
      rows[r].Raise(most, unit);
      const float above = ReferenceOf(rows[r].most);
#pragma unroll
      for (int n = 0; n < kPairs / 2; ++n) {
        float& x = scores[n / 2 * 4 + 2 * r + n % 2];
        x = FastExp2(RoundedDifference(x, above) * unit);
        rows[r].sum += x;
      }
    }
  }

  // A hidden key has no weight, and an arbitrary dP.
  __device__ __forceinline__ void AddDelta(bool hidden) {
    const float(&weights)[kPairs] = this->scores;
    float(&d_weights)[kPairs] = this->d_weights;
    if (hidden) {
#pragma unroll
      for (int n = 0; n < kPairs; ++n) d_weights[n] = weights[n] > 0.0f ? d_weights[n] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      float& delta = rows[n / 2 % 2].delta;
      delta = fmaf(weights[n], d_weights[n], delta);
    }
  }

  __device__ __forceinline__ void Walk() {
    Stage<T::kStagesK> k;
    Stage<T::kStagesV> v;
    Wait(this->shared.FullRows(), 0);
    Wait(this->shared.FullK(0), 0);
    this->IssueScores(0);
    WgmmaWait<0>();
    HoldRegisters(this->scores);
    for (int key = this->work.key_begin; key < this->work.key_end; key += T::kKeys) {
      Release(this->shared.EmptyK(k.index));
      k.Step();
      Wait(this->shared.FullV(v.index), v.parity);
      this->IssueDWeights(v.index);
      const bool hidden = HasHidden(key);
      Weigh(key, hidden);
      WgmmaWait<0>();
      HoldRegisters(this->d_weights);
      Release(this->shared.EmptyV(v.index));
      v.Step();
      AddDelta(hidden);
      if (key + T::kKeys < this->work.key_end) {
        Wait(this->shared.FullK(k.index), k.parity);
        this->IssueScores(k.index);
        WgmmaWait<0>();
        HoldRegisters(this->scores);
      }
    }
  }

  __device__ __forceinline__ void Run() {
    if (this->work.key_begin < this->work.key_end) Walk();
    const BackwardPass& pass = this->params.pass;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[r].AddLane(1, unit);
      rows[r].AddLane(2, unit);
      const int i = this->row + 8 * r;
      if (threadIdx.x % 4 != 0 || i >= this->work.band.q_len) continue;
      const QueriesWork& work = this->work;
      const Measured how = MeasuredOf(pass, work.s, work.b, work.head, i);
      if (how == Measured::kNothing) continue;
      StoreMeasured(pass, work.s, work.b, work.head, i, rows[r], how, unit, sign);
    }
  }
};

template <class T, class Class, int kCount>
__global__ void __launch_bounds__(kMeasureThreads, 1)
    MeasureSm90(const __grid_constant__ LaunchList<Sm90Params, kCount> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  // Not in registers: the consumers have none to spare.
  __shared__ alignas(QueriesWork) char place[sizeof(QueriesWork)];
  __shared__ bool shifted;
  __shared__ float shifts[T::kRows];
  const QueriesShared<T> shared{(SharedAddress(unaligned) + 1023) / 1024 * 1024};
  const QueriesWork& work = *reinterpret_cast<const QueriesWork*>(place);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  for (uint32_t block = blockIdx.x; block < list.blocks; block += gridDim.x) {
    const Sm90Params& params = list.Of(block);
    if (!HasMeasured(params.pass)) {
      if (kCount == 1) return;
      continue;
    }
    __syncthreads();  // the previous tile is done
    if (threadIdx.x == 0) new (place) QueriesWork(QueriesWork::Of(params, T{}, block));
    __syncthreads();
    const int end = min(work.row + T::kRows, work.band.q_len);
    if (!IsAnyMeasured(params.pass, work.s, work.b, work.head, work.row, end)) continue;
    if (threadIdx.x == 0) shared.Init();
    __syncthreads();
    if (warp == 4 * kConsumers) {
      if (work.key_begin < work.key_end) {
        QueriesProducer<T> producer{params, work, shared, static_cast<int>(threadIdx.x % 32)};
        producer.Run();
      }
    } else {
      MeasureConsumer<T, Class> consumer(params, work, shared, shifted, shifts, warp / 4);
      consumer.Run();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int n = 0; n < T::kBarriers; ++n) EndBarrier(shared.Barriers(n));
    }
  }
#endif
}

}  // namespace attend::cuda::backward
