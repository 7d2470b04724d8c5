// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by wgmma and TMA: shared by its kernels. KeysSm90 (sm90_keys_block.cuh)
// computes dK and dV, one block per tile of keys over the rows of all heads of the group, and
// QueriesSm90 (sm90_queries.cuh) dQ, one block per tile of rows over its keys: each sum belongs to
// one block, so none waits for another, but both compute scores and dP, seven products instead of
// five. TurnsSm90 (sm90_turns.cuh) computes all three with five; its blocks take turns at dQ, which
// is thus added in a fixed order. Device code for sm_90a.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/backward/band.cuh"
#include "kernels/cuda/backward/launch_list.cuh"
#include "kernels/cuda/backward/store_rows.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"
#include "kernels/cuda/ptx/exponent_base.cuh"
#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/ptx/tanh.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ragged/tensor_maps.h"

namespace attend::cuda::backward {

inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = 128 * (kConsumers + 1);
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kCols = 64;  // per box: 128-byte rows
inline constexpr int kRowBytes = 2 * kCols;
inline constexpr int kSharedBytesMax = 227 * 1024;  // per block

// Compile-time properties of a kernel beside its tile.
template <bool kIsBfloat16, bool kHasSoftcap = false, bool kHasDropout = false>
struct Sm90Class {
  static constexpr bool kBfloat16 = kIsBfloat16;
  static constexpr bool kSoftcap = kHasSoftcap;
  static constexpr bool kShifts = !kSoftcap;  // capped scores are bounded: no row has a shift
  static constexpr bool kDropout = kHasDropout;
};

// An item of a launch. maps.o is dO's; a box has a tile's rows.
struct Sm90Params {
  BackwardPass pass;
  TensorMaps maps;
  float cap_factor;  // CapFactor
  float kept_scale;  // factor of the weights that dropout keeps
  int64_t heads;     // over all sequences: of K and V, or of Q
  int64_t section;   // heads per section
  int group;         // heads of Q for each of K and V
};

// A tile of kRows x kD: consecutive boxes of 64 columns. Columns of the last box beyond kD are not
// read.
template <int kRows, int kD>
struct BoxedTile {
  static constexpr int kDim = kD;
  static constexpr int kBoxes = (kD + kCols - 1) / kCols;
  static constexpr int kBoxBytes = kRows * kRowBytes;
  static constexpr int kBytes = kBoxes * kBoxBytes;
};

// The first of the thread's two rows among a warpgroup's 64 from `first` on; the second is 8
// further.
__device__ __forceinline__ int RowOfThread(int first) {
  return first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}

// The next stage of a ring buffer, and its barriers' parity.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Step() {
    if (++index < kStages) return;
    index = 0;
    parity ^= 1;
  }
};

// The first columns of a warpgroup's 64 rows of A, in registers: kChunks fragments of 16.
template <int kChunks>
struct HeldColumns {
  uint32_t chunks[kChunks > 0 ? kChunks : 1][4];

  __device__ __forceinline__ void Load(uint32_t a, int a_box) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = a + (threadIdx.x / 32 % 4 * 16 + lane % 16) * kRowBytes;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int column = (2 * n % 8 + lane / 16) ^ lane % 8;  // 16-byte chunk, swizzled
      LoadMatrix(row + n / 4 * a_box + 16 * column, chunks[n]);
    }
  }
};

// d = A B^T, rows of both along the head dim. Held columns of A are not read from shared memory.
template <int kN, int kD, bool kBfloat16, int kHeld = 0>
__device__ __forceinline__ void IssueAlong(float (&d)[kN / 2], uint32_t a, int a_box, uint32_t b,
                                           int b_box, const HeldColumns<kHeld>& held = {}) {
  const auto left = SmemTile<kCols>::AlongRows(a);
  const auto right = SmemTile<kCols>::AlongRows(b);
#pragma unroll
  for (int n = 0; n < kD / 16; ++n) {
    const int box = n / (kCols / 16);
    const int bytes = n % (kCols / 16) * 32;
    const uint64_t other = right.At(box * b_box + bytes);
    if (n < kHeld) {
      Wgmma<kN, kBfloat16>::template Registers<false>(d, held.chunks[n], other, n > 0);
    } else {
      Wgmma<kN, kBfloat16>::template Shared<false>(d, left.At(box * a_box + bytes), other, n > 0);
    }
  }
}

// d += A B, A in registers, kDepth rows of B as the product's depth.
template <int kDepth, int kD, bool kBfloat16>
__device__ __forceinline__ void IssueDown(float (&d)[kD / 2], const uint32_t* a, uint32_t b,
                                          int b_box, bool accumulate) {
  const auto right = SmemTile<kCols>::DownRows(b, b_box);
#pragma unroll
  for (int n = 0; n < kDepth / 16; ++n) {
    Wgmma<kD, kBfloat16>::template Registers<true>(d, a + 4 * n, right.At(16 * kRowBytes * n),
                                                   accumulate || n > 0);
  }
}

// Zeroes the rows of a tile from `begin` on.
template <int kRows, int kD>
__device__ __forceinline__ void PatchRows(uint32_t tile, int begin, int lane) {
  using Tile = BoxedTile<kRows, kD>;
#pragma unroll 1
  for (int box = 0; box < Tile::kBoxes; ++box) {
#pragma unroll 1
    for (int byte = begin * kRowBytes + 16 * lane; byte < Tile::kBoxBytes; byte += 16 * 32) {
      StoreShared16(tile + box * Tile::kBoxBytes + byte, make_uint4(0, 0, 0, 0));
    }
  }
}

// Gives the rows of a tile from `begin` on, of `rows`, neutral terms. The loaded ones are another
// sequence's, and may be NaN.
__device__ __forceinline__ void PatchTerms(uint32_t terms, int begin, int rows, float value,
                                           int lane) {
  for (int row = begin + lane; row < rows; row += 32) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(terms + 4 * row), "f"(value) : "memory");
  }
}

// Loads floats: 16-byte aligned, a multiple of four.
__device__ __forceinline__ void LoadFloats(const float* from, uint32_t shared, int count,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(from), "r"(4 * count), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ float2 LoadShared2(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ uint4 LoadShared16(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// Loads all boxes of a tile; one thread.
template <class Tile>
__device__ __forceinline__ void LoadTile(const CUtensorMap* map, uint32_t to, uint32_t barrier,
                                         int row, int head, int batch, CachePolicy policy) {
#pragma unroll
  for (int n = 0; n < Tile::kBoxes; ++n) {
    LoadBox(map, to + n * Tile::kBoxBytes, barrier, n * kCols, row, head, batch, policy);
  }
}

// Subtracts shifts from the scores of a tile, keys down: `shifts` are its rows', of which a thread
// has two of every eight.
template <int kPairs>
__device__ __forceinline__ void ShiftScores(float (&scores)[kPairs], uint32_t shifts) {
#pragma unroll
  for (int j = 0; j < kPairs / 4; ++j) {
    const float2 shift = LoadShared2(shifts + 4 * (8 * j + 2 * (threadIdx.x % 4)));
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[4 * j + i] -= i % 2 == 0 ? shift.x : shift.y;
  }
}

// How scores become weights, and softcap's effect on gradients. A score is a raw product, or with
// softcap its tanh.
template <class Class>
struct WeightRule {
  static constexpr bool kSoftcap = Class::kSoftcap;
  float to_log2;  // of a score
  float cap_factor;
  float kept_scale;  // factor of the weights that dropout keeps

  explicit __device__ __forceinline__ WeightRule(const Sm90Params& params)
      : to_log2((kSoftcap ? params.pass.attention.problem.softcap
                          : params.pass.attention.problem.scale) *
                kLog2E),
        cap_factor(params.cap_factor),
        kept_scale(params.kept_scale) {}

  // Call before masking.
  template <int kCount>
  __device__ __forceinline__ void Cap(float (&scores)[kCount]) const {
    if constexpr (kSoftcap) CapProducts(cap_factor, scores);
  }
  __device__ __forceinline__ float Weight(float score, float lse2) const {
    return FastExp2(fmaf(score, to_log2, -lse2));
  }
  // The weight times softcap's slope, which is 0 for a hidden score, -Inf.
  static __device__ __forceinline__ float Sloped(float weight, float score) {
    return kSoftcap ? weight * fmaxf(fmaf(-score, score, 1.0f), 0.0f) : weight;
  }
};

// A weight that dropout removes from O is marked by its sign, because dS still needs it.
__device__ __forceinline__ float Marked(float weight, bool kept) { return kept ? weight : -weight; }

// dS of a weight, which is marked if there is dropout.
template <class Class>
__device__ __forceinline__ float DScore(const WeightRule<Class>& rule, float weight, float d_weight,
                                        float less) {
  if constexpr (!Class::kDropout) return weight * (d_weight - less);
  const bool kept = __float_as_int(weight) >= 0;
  return fabsf(weight) * (kept ? fmaf(d_weight, rule.kept_scale, -less) : -less);
}

// A block's head, counted over all sequences, and tile. Concurrent blocks walk the same tensors,
// those of the heads of a section, so that most loads hit the L2 cache; within a section the first
// tiles come first.
struct BlockPlace {
  int64_t head, tile;

  static __device__ __forceinline__ BlockPlace Of(const Sm90Params& params, int64_t tiles,
                                                  uint32_t of_launch) {
    const int64_t block = of_launch - params.pass.first_block;
    const int64_t first = block / (params.section * tiles) * params.section;
    const int64_t heads = min(params.section, params.heads - first);
    const int64_t within = block - first * tiles;
    return {first + within % heads, within / heads};
  }
};

// One arrival per warp, after its earlier accesses.
__device__ __forceinline__ void Release(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) Arrive(barrier);
}

template <bool kBfloat16, int kCount>
__device__ __forceinline__ void PackAll(const float (&from)[2 * kCount], uint32_t (&to)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n] = PackPair<kBfloat16>(from[2 * n], from[2 * n + 1]);
}

}  // namespace attend::cuda::backward
