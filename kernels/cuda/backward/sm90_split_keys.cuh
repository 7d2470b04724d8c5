// SPDX-License-Identifier: Apache-2.0
//
// dK and dV of 64 keys, for D and Dv whose sums do not fit the registers of one warpgroup: the
// first consumer computes scores, P and dV, the second dP, dS and dK. Both do equal work whatever D
// and Dv are, no product is computed twice, and each thread has the same pairs as its counterpart
// in the other warpgroup, to which it passes P in fp32 through shared memory. A step:
//
//   first    Tensor Cores | dV += P dO, next scores |
//            warpgroup    | (waits)                 | P ...
//   second   Tensor Cores | dK += dS Q, next dP     |
//            warpgroup    | (waits)                 | dS ...
//
// Each one's arithmetic overlaps with the other's products. (Issuing the next scores before dV, to
// compute P during dV, would keep tiles of Q and dO for one more step, and only two of each fit.)

#pragma once

#include "kernels/cuda/backward/sm90_keys_block.cuh"

namespace attend::cuda::backward {

// Address of a thread's pairs [4 j, 4 j + 4) in a buffer.
__device__ __forceinline__ uint32_t ExchangePlace(uint32_t buffer, int j) {
  return buffer + 16 * (128 * j + threadIdx.x % 128);
}

// Which of a thread's pairs dropout keeps: of each 16 keys by 16 rows, keys k = lane / 4 and k + 8
// by rows c = lane % 4 * 2, c + 1, c + 8 and c + 9. They are halves of two groups (of rows c and c
// + 1), whose other halves belong to the lane whose key is the other of an even and an odd one. So
// each of the two lanes draws one group, and they exchange halves.
struct KeysDropout {
  uint64_t seed;
  uint32_t head, sequence;
  uint32_t row, key;  // DropoutGroup's counters
  uint32_t least;     // kept: the draw, in 32 bits' upper half, is at least this

  // `key`: first of the warp's 16.
  static __device__ __forceinline__ KeysDropout Of(const Attention& a, int64_t b, int64_t h,
                                                   int key) {
    const int lane = threadIdx.x % 32;
    KeysDropout at;
    at.seed = a.dropout.seed;
    at.head = static_cast<uint32_t>(a.dropout.head + h);
    at.sequence = static_cast<uint32_t>(a.dropout.sequence + b);
    at.row = static_cast<uint32_t>(a.dropout.row / 16 * 8) + lane % 4 * 2 + lane / 4 % 2;
    at.key = static_cast<uint32_t>((a.problem.key_offset + key) / 16 * 4) + lane / 8;
    at.least = static_cast<uint32_t>(a.problem.dropout) << 16;
    return at;
  }

  // Draws of the 16 rows from `first` on: [2 * i + n] has the draw of row c + i + 8 * n with key k
  // in its lower half, and with key k + 8 in its upper half.
  __device__ __forceinline__ void Draw(int first, uint32_t (&draws)[4]) const {
    const bool odd = threadIdx.x / 4 % 2 != 0;
    const DropoutBits bits = DropoutPhilox(seed, row + first / 16 * 8, key, head, sequence);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t even_keys = __byte_perm(bits.words[2 * n], bits.words[2 * n + 1], 0x5410);
      const uint32_t odd_keys = __byte_perm(bits.words[2 * n], bits.words[2 * n + 1], 0x7632);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? even_keys : odd_keys, 4);
      draws[n] = odd ? other : even_keys;
      draws[2 + n] = odd ? odd_keys : other;
    }
  }
};

template <class T, class Class>
struct ValuesConsumer {
  static constexpr int kPairs = T::kRows / 2;  // per thread: two keys, 8 apart
  static constexpr bool kBfloat16 = Class::kBfloat16;

  const KeysShared<T> shared;
  const KeysOfThread<T, Class> keys;
  float scores[kPairs];
  float d_v[T::kDv / 2];
  uint32_t weights[kPairs / 2];
  HeldColumns<T::kHeldK> held;
  KeysDropout dropout = {};  // if the class has dropout

  __device__ __forceinline__ void IssueScores(int stage) {
    WgmmaFence();
    IssueAlong<T::kRows, T::kD, kBfloat16>(scores, shared.K(), T::K::kBoxBytes, shared.Q(stage),
                                           T::Q::kBoxBytes, held);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueValues(int stage, bool accumulate) {
    WgmmaFence();
    IssueDown<T::kRows, T::kDv, kBfloat16>(d_v, weights, shared.O(stage), T::O::kBoxBytes,
                                           accumulate);
    WgmmaCommit();
  }

  // Turns scores into weights; those for dS are passed to the other consumer.
  __device__ __forceinline__ void Exponentiate(int row, uint32_t terms, uint32_t buffer) {
    keys.FinishScores(scores, row, terms);
    uint32_t draws[4];
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 lse2 = keys.Lse2(terms, j);
      if (Class::kDropout && j % 2 == 0) dropout.Draw(row + 8 * j, draws);
      uint32_t sent[4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float* const pair = scores + 4 * j + i;
        float low = keys.rule.Weight(pair[0], lse2.x);
        float high = keys.rule.Weight(pair[1], lse2.y);
        float slopes[2] = {keys.rule.Sloped(low, pair[0]), keys.rule.Sloped(high, pair[1])};
        if constexpr (Class::kDropout) {
          const int shift = i == 0 ? 16 : 0;
          const bool kept[2] = {draws[j % 2] << shift >= dropout.least,
                                draws[2 + j % 2] << shift >= dropout.least};
          slopes[0] = Marked(slopes[0], kept[0]);
          slopes[1] = Marked(slopes[1], kept[1]);
          if (!kept[0]) low = 0.0f;
          if (!kept[1]) high = 0.0f;
        }
        weights[2 * j + i / 2] = PackPair<kBfloat16>(low, high);
        sent[i] = __float_as_uint(slopes[0]);
        sent[i + 1] = __float_as_uint(slopes[1]);
      }
      StoreShared16(ExchangePlace(buffer, j), make_uint4(sent[0], sent[1], sent[2], sent[3]));
    }
  }

  __device__ __forceinline__ void Accumulate() {
    const int steps = keys.Steps();
    Stage<T::kStages> stage;
    Stage<T::kExchanges> exchange;
    int row = keys.work.row_begin;
    if constexpr (Class::kDropout) {
      const Attention& a = keys.params.pass.attention;
      dropout = KeysDropout::Of(a, keys.work.b, keys.work.kv_head * a.problem.group(),
                                keys.first + threadIdx.x / 32 % 4 * 16);
    }
    Wait(shared.FullKeys(), 0);
    held.Load(shared.K(), T::K::kBoxBytes);
    Wait(shared.FullQ(0), 0);
    IssueScores(0);
    WgmmaWait<0>();
    HoldRegisters(scores);
    for (int n = steps; n > 0; --n) {
      const int now = stage.index;
      Wait(shared.EmptyExchange(exchange.index), exchange.parity ^ 1);
      Exponentiate(row, shared.Terms(now), shared.Exchange(exchange.index));
      __syncwarp();
      Release(shared.FullExchange(exchange.index));
      exchange.Step();
      Release(shared.EmptyQ(now));
      Wait(shared.FullO(now), stage.parity);
      IssueValues(now, n < steps);
      stage.Step();
      if (n > 1) {
        Wait(shared.FullQ(stage.index), stage.parity);
        IssueScores(stage.index);
        WgmmaWait<1>();
        Release(shared.EmptyO(now));
      }
      WgmmaWait<0>();
      HoldRegisters(d_v);
      HoldRegisters(scores);
      HoldRegisters(weights);
      row = keys.NextRow(row);
      if (row == keys.work.row_begin) ++dropout.head;
    }
  }

  __device__ __forceinline__ void Run() {
    if (keys.work.row_begin < keys.work.row_end) {
      Accumulate();
    } else {
#pragma unroll
      for (float& x : d_v) x = 0.0f;
    }
    const BackwardPass& pass = keys.params.pass;
    keys.template Store<T::kDv>(pass.gradients.d_v, d_v,
                                Class::kDropout ? keys.rule.kept_scale : 1.0f,
                                pass.attention.problem.dim_v, 0);
  }
};

template <class T, class Class>
struct KeysOnlyConsumer {
  static constexpr int kPairs = T::kRows / 2;  // per thread: two keys, 8 apart
  static constexpr bool kBfloat16 = Class::kBfloat16;

  const KeysShared<T> shared;
  const KeysOfThread<T, Class> keys;
  float d_weights[kPairs];
  float d_k[T::kD / 2];
  uint32_t d_scores[kPairs / 2];
  HeldColumns<T::kHeldV> held;

  __device__ __forceinline__ void IssueDWeights(int stage) {
    WgmmaFence();
    IssueAlong<T::kRows, T::kDv, kBfloat16>(d_weights, shared.V(), T::V::kBoxBytes, shared.O(stage),
                                            T::O::kBoxBytes, held);
    WgmmaCommit();
  }
  __device__ __forceinline__ void IssueKeys(int stage, bool accumulate) {
    WgmmaFence();
    IssueDown<T::kRows, T::kD, kBfloat16>(d_k, d_scores, shared.Q(stage), T::Q::kBoxBytes,
                                          accumulate);
    WgmmaCommit();
  }

  __device__ __forceinline__ void Differentiate(uint32_t terms, uint32_t buffer) {
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const float2 less = keys.Less(terms, j);
      const uint4 weights = LoadShared16(ExchangePlace(buffer, j));
      const uint32_t weight[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = d_weights[4 * j + i];
        x = DScore(keys.rule, __uint_as_float(weight[i]), x, i % 2 == 0 ? less.x : less.y);
      }
    }
    PackAll<kBfloat16>(d_weights, d_scores);
  }

  __device__ __forceinline__ void Accumulate() {
    const int steps = keys.Steps();
    Stage<T::kStages> stage;
    Stage<T::kExchanges> exchange;
    Wait(shared.FullKeys(), 0);
    held.Load(shared.V(), T::V::kBoxBytes);
    Wait(shared.FullO(0), 0);
    IssueDWeights(0);
    WgmmaWait<0>();
    HoldRegisters(d_weights);
    for (int n = steps; n > 0; --n) {
      const int now = stage.index;
      Release(shared.EmptyO(now));
      Wait(shared.FullQ(now), stage.parity);
      Wait(shared.FullExchange(exchange.index), exchange.parity);
      Differentiate(shared.Terms(now), shared.Exchange(exchange.index));
      __syncwarp();
      Release(shared.EmptyExchange(exchange.index));
      exchange.Step();
      IssueKeys(now, n < steps);
      stage.Step();
      if (n > 1) {
        Wait(shared.FullO(stage.index), stage.parity);
        IssueDWeights(stage.index);
        WgmmaWait<1>();
        Release(shared.EmptyQ(now));
      }
      WgmmaWait<0>();
      HoldRegisters(d_k);
      HoldRegisters(d_weights);
      HoldRegisters(d_scores);
    }
  }

  __device__ __forceinline__ void Run() {
    if (keys.work.row_begin < keys.work.row_end) {
      Accumulate();
    } else {
#pragma unroll
      for (float& x : d_k) x = 0.0f;
    }
    const BackwardPass& pass = keys.params.pass;
    const Problem& p = pass.attention.problem;
    keys.template Store<T::kD>(pass.gradients.d_k, d_k, p.scale, p.dim, 0);
  }
};

template <class T, class Class>
struct SplitKeysConsumer {
  static_assert(T::kKeys == 64 && T::kExchanges > 0);

  const KeysShared<T> shared;
  const int group;  // warpgroup
  const KeysOfThread<T, Class> keys;

  __device__ __forceinline__ SplitKeysConsumer(const Sm90Params& params, const KeysWork& work,
                                               const KeysShared<T>& shared, const bool& shifted,
                                               int group)
      : shared(shared), group(group), keys(params, work, shifted, work.key) {}

  __device__ __forceinline__ void Run() {
    if (group == 0) {
      ValuesConsumer<T, Class> consumer{shared, keys};
      consumer.Run();
    } else {
      KeysOnlyConsumer<T, Class> consumer{shared, keys};
      consumer.Run();
    }
  }
};

}  // namespace attend::cuda::backward
