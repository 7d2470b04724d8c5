// SPDX-License-Identifier: Apache-2.0
//
// dK and dV of 128 keys, each consumer with 64 of them. A step:
//
//   Tensor Cores | dP     | dV += P dO, dK += dS Q, next scores |
//   warpgroup    | P      | (waits)                             | dS ...
//
// where the other consumer's products overlap with this one's arithmetic.

#pragma once

#include "kernels/cuda/backward/sm90_keys_block.cuh"

namespace attend::cuda::backward {

template <class T, class Class>
struct KeysConsumer {
  static constexpr int kPairs = T::kRows / 2;  // per thread: two keys, 8 apart
  static constexpr bool kBfloat16 = Class::kBfloat16;
  static_assert(T::kKeys == 64 * kConsumers && !Class::kDropout);

  const KeysShared<T> shared;
  const int group;  // warpgroup
  const KeysOfThread<T, Class> keys;
  float scores[kPairs], d_weights[kPairs];
  float d_v[T::kDv / 2], d_k[T::kD / 2];
  uint32_t weights[kPairs / 2], d_scores[kPairs / 2];

  __device__ __forceinline__ KeysConsumer(const Sm90Params& params, const KeysWork& work,
                                          const KeysShared<T>& shared, const bool& shifted,
                                          int group)
      : shared(shared), group(group), keys(params, work, shifted, work.key + 64 * group) {}

  __device__ __forceinline__ void IssueScores(int stage) {
    WgmmaFence();
    IssueAlong<T::kRows, T::kD, kBfloat16>(scores, shared.K() + group * 64 * kRowBytes,
                                           T::K::kBoxBytes, shared.Q(stage), T::Q::kBoxBytes);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueDWeights(int stage) {
    WgmmaFence();
    IssueAlong<T::kRows, T::kDv, kBfloat16>(d_weights, shared.V() + group * 64 * kRowBytes,
                                            T::V::kBoxBytes, shared.O(stage), T::O::kBoxBytes);
    WgmmaCommit();
  }

  // Turns scores into weights, for P and for dS.
  __device__ __forceinline__ void Exponentiate(int row, uint32_t terms) {
    keys.FinishScores(scores, row, terms);
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 lse2 = keys.Lse2(terms, j);
#pragma unroll
      for (int n = 4 * j; n < 4 * j + 4; n += 2) {
        const float low = keys.rule.Weight(scores[n], lse2.x);
        const float high = keys.rule.Weight(scores[n + 1], lse2.y);
        weights[n / 2] = PackPair<kBfloat16>(low, high);
        scores[n] = keys.rule.Sloped(low, scores[n]);
        scores[n + 1] = keys.rule.Sloped(high, scores[n + 1]);
      }
    }
  }

  __device__ __forceinline__ void Differentiate(uint32_t terms) {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 less = keys.Less(terms, j);
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
    IssueDown<T::kRows, T::kDv, kBfloat16>(d_v, weights, shared.O(stage), T::O::kBoxBytes,
                                           accumulate);
    IssueDown<T::kRows, T::kD, kBfloat16>(d_k, d_scores, shared.Q(stage), T::Q::kBoxBytes,
                                          accumulate);
    WgmmaCommit();
  }

  __device__ __forceinline__ void Accumulate() {
    const int steps = keys.Steps();
    Stage<T::kStages> stage;
    int row = keys.work.row_begin;
    Wait(shared.FullKeys(), 0);
    Wait(shared.FullQ(0), 0);
    IssueScores(0);
    WgmmaWait<0>();
    HoldRegisters(scores);
    for (int n = steps; n > 0; --n) {
      const int now = stage.index;
      Wait(shared.FullO(now), stage.parity);
      IssueDWeights(now);
      Exponentiate(row, shared.Terms(now));
      WgmmaWait<0>();
      HoldRegisters(d_weights);
      Differentiate(shared.Terms(now));
      IssueKeys(now, n < steps);
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
      row = keys.NextRow(row);
    }
  }

  __device__ __forceinline__ void Run() {
    if (keys.work.row_begin < keys.work.row_end) {
      Accumulate();
    } else {
#pragma unroll
      for (float& x : d_k) x = 0.0f;
#pragma unroll
      for (float& x : d_v) x = 0.0f;
    }
    const Problem& p = keys.params.pass.attention.problem;
    const Gradients& to = keys.params.pass.gradients;
    keys.template Store<T::kDv>(to.d_v, d_v, 1.0f, p.dim_v, 64 * group);
    keys.template Store<T::kD>(to.d_k, d_k, p.scale, p.dim, 64 * group);
  }
};

}  // namespace attend::cuda::backward
