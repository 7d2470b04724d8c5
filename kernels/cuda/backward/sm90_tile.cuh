// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by wgmma and TMA: what its two kernels share. KeysSm90 (sm90_keys.cuh) leaves
// dK and dV, a block for each tile of keys over the rows of all heads of the group; QueriesSm90
// (sm90_queries.cuh) leaves dQ, a block for each tile of rows over its keys. So no sum needs more
// than one block: nothing is added atomically, and no block waits for another. Both compute the
// scores and dP, seven products in place of five. Device code for sm_90a.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/backward/band.cuh"
#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/backward/store_rows.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/exponent_base.cuh"
#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ragged/tensor_maps.h"

namespace attend::cuda::backward {

inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = 128 * (kConsumers + 1);
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kCols = 64;  // of a box: 128-byte rows
inline constexpr int kRowBytes = 2 * kCols;
inline constexpr int kQueryBox = 64;  // rows of a box of Q and dO
inline constexpr int kKeyBox = 128;   // and of K and V

// A kernel's parameter. maps.o is that of dO.
struct Sm90Params {
  BackwardPass pass;
  TensorMaps maps;
};

// A tile of kRows x kD: boxes of 64 columns after one another.
template <int kRows, int kD>
struct BoxedTile {
  static constexpr int kBoxes = kD / kCols;
  static constexpr int kBoxBytes = kRows * kRowBytes;
  static constexpr int kBytes = kBoxes * kBoxBytes;
};

// The stage that is used next, and the parity of its barriers.
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

// d = A B^T, rows of both along the head dim.
template <int kN, int kD, bool kBfloat16>
__device__ __forceinline__ void IssueAlong(float (&d)[kN / 2], uint32_t a, int a_box, uint32_t b,
                                           int b_box) {
  const auto left = SmemTile<kCols>::AlongRows(a);
  const auto right = SmemTile<kCols>::AlongRows(b);
#pragma unroll
  for (int box = 0; box < kD / kCols; ++box) {
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
      Wgmma<kN, kBfloat16>::template Shared<false>(
          d, left.At(box * a_box + 32 * n), right.At(box * b_box + 32 * n), box > 0 || n > 0);
    }
  }
}

// d += A B, A in registers, the depth of kDepth down B's rows.
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

// Waits for what the copy engine brought, deletes rows [begin, kRows), and lets others read it.
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

// Loads floats, 16-byte aligned, a multiple of four.
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

template <bool kBfloat16, int kCount>
__device__ __forceinline__ void PackAll(const float (&from)[2 * kCount], uint32_t (&to)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n] = PackPair<kBfloat16>(from[2 * n], from[2 * n + 1]);
}

}  // namespace attend::cuda::backward
