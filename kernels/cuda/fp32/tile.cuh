// SPDX-License-Identifier: Apache-2.0
//
// Geometry of cuda_flash_fp32's tiles, and data movement: which thread owns which part of a tile,
// and the loads of Q, K and V into shared memory. Device code; all threads of a block call each
// function together.

#pragma once

#include <type_traits>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// Compile-time configuration of a tile. A warp's lanes form a grid; all keys of a row belong to one
// warp, so that the softmax needs no other.
struct TileConfig {
  int head_dim;         // upper bound of D and Dv
  int lane_cols;        // of the grid: 8 or 16 (LanePlace); it has 32 / lane_cols rows
  int warps;            // per block
  int thread_rows = 8;  // query rows per thread, kLaneRows apart
  int keys = 64;        // per tile of K or V
  int blocks = 1;       // per multiprocessor
  int unroll = 2;       // factor for the products' loops
  bool paged = false;   // K and V are paged
};

constexpr TileConfig InPages(TileConfig config) {
  config.paged = true;
  return config;
}

// A block computes kRows query rows. A thread owns kThreadKeys keys of the score tile (kLaneCols
// apart) and kThreadCols float4 columns of the output (kLaneCols float4 apart).
template <TileConfig kConfig>
struct Tile {
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kLaneCols = kConfig.lane_cols;
  static constexpr int kLaneRows = 32 / kLaneCols;
  static constexpr int kThreadRows = kConfig.thread_rows;
  static constexpr int kKeys = kConfig.keys;
  static constexpr int kThreadKeys = kKeys / kLaneCols;
  static constexpr int kThreadCols = kDim / (4 * kLaneCols);
  static constexpr int kWarpRows = kLaneRows * kThreadRows;
  static constexpr int kRows = kWarpRows * kConfig.warps;
  static constexpr int kThreads = 32 * kConfig.warps;
  static constexpr int kBlocks = kConfig.blocks;
  static constexpr int kUnroll = kConfig.unroll;
  static constexpr bool kPaged = kConfig.paged;
  using Paged = Tile<InPages(kConfig)>;

  // One bit per score of a thread.
  using Bits = std::conditional_t<kThreadRows * kThreadKeys <= 32, uint32_t, uint64_t>;

  // Rows of Q and K are padded by four floats, so that the 8 rows that half a warp reads at once
  // are in different banks. P has no room for padding at D = 128 and is swizzled (WeightColumn).
  static constexpr int kStrideQK = kDim + 4;
  static constexpr int kOffsetK = kRows * kStrideQK;
  static constexpr int kOffsetV = kOffsetK + kKeys * kStrideQK;
  static constexpr int kOffsetP = kOffsetV + kKeys * kDim;
  static constexpr int kSharedBytes = 4 * (kOffsetP + kRows * kKeys);

  static_assert(kThreadKeys >= 1 && kThreadCols >= 1 && kThreadRows * kThreadKeys <= 64);
  static_assert(kKeys >= 4 * kLaneRows, "the swizzle of P stays inside a row");
};

// A lane's place in its warp's grid. Adjacent lanes (bit 0) share their columns and pairs of lanes
// (bit 1) share their rows, so that shared memory serves half a warp's 16-byte reads in one pass.
template <class T>
struct LanePlace {
  int row;  // first row of this thread within the block
  int col;  // 0 .. kLaneCols - 1
  int swizzle;

  __device__ __forceinline__ LanePlace() {
    const int lane = threadIdx.x % 32;
    int lane_row = lane & 1;
    if constexpr (T::kLaneCols == 8) {
      lane_row += (lane >> 4) * 2;
      col = (lane >> 1) & 7;
    } else {
      static_assert(T::kLaneCols == 16);
      col = lane >> 1;
    }
    row = (threadIdx.x / 32) * T::kWarpRows + lane_row;
    swizzle = 4 * lane_row;
  }
};

// Maximum, or sum, over the lanes that share a row.
template <class T>
__device__ __forceinline__ float RowMax(float value) {
#pragma unroll
  for (int bit = 2; bit < 2 * T::kLaneCols; bit *= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, bit));
  }
  return value;
}
template <class T>
__device__ __forceinline__ float RowSum(float value) {
#pragma unroll
  for (int bit = 2; bit < 2 * T::kLaneCols; bit *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, bit);
  }
  return value;
}

// Some rows of Q, K or V in global memory.
struct Rows {
  const void* data;  // first row
  int64_t stride;    // between rows, elements
  int valid;         // existing rows; later ones are never read and become 0
  int dim;           // existing columns
  bool four_aligned;
};

// Four adjacent 16-bit elements, widened; 0 beyond the existing columns.
__device__ __forceinline__ float4 LoadNarrow4(const uint16_t* data, DType dtype, int columns,
                                              bool four_aligned) {
  ushort4 bits = make_ushort4(0, 0, 0, 0);
  if (four_aligned) {
    bits = *reinterpret_cast<const ushort4*>(data);
  } else {
    bits.x = data[0];
    if (columns > 1) bits.y = data[1];
    if (columns > 2) bits.z = data[2];
    if (columns > 3) bits.w = data[3];
  }
  return make_float4(Widen(dtype, bits.x), Widen(dtype, bits.y), Widen(dtype, bits.z),
                     Widen(dtype, bits.w));
}

// The four-element chunks that a thread copies to shared memory, for any dtype: one column, every
// kStep-th row.
template <class T>
struct ChunkPlace {
  static constexpr int kChunks = T::kDim / 4;
  static constexpr int kStep = T::kThreads / kChunks;
  static_assert(T::kThreads % kChunks == 0);
  int row = threadIdx.x / kChunks;
  int col = threadIdx.x % kChunks * 4;
};

// Copies kCount rows to shared memory as fp32; asynchronously if the data are fp32.
template <class T, int kCount, int kStride, bool kAnyDType>
__device__ __forceinline__ void LoadTile(float* shared, const Rows& rows, DType dtype) {
  using Place = ChunkPlace<T>;
  const Place place;
  if (place.col >= rows.dim) return;
  const int columns = rows.dim - place.col;
  float* destination = shared + place.row * kStride + place.col;
  const void* source = Advance(rows.data, dtype, place.row * rows.stride + place.col);
  const int64_t step = Place::kStep * rows.stride;
#pragma unroll 1
  for (int row = place.row; row < kCount; row += Place::kStep) {
    const bool valid = row < rows.valid;
    if (kAnyDType && dtype != DType::kFloat32) {
      float4 value = make_float4(0, 0, 0, 0);
      if (valid) {
        value =
            LoadNarrow4(static_cast<const uint16_t*>(source), dtype, columns, rows.four_aligned);
      }
      *reinterpret_cast<float4*>(destination) = value;
    } else if (rows.four_aligned) {
      CopyAsync16(destination, static_cast<const float*>(source), valid);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        CopyAsync4(destination + e, static_cast<const float*>(source) + e, valid && e < columns);
      }
    }
    destination += Place::kStep * kStride;
    source = Advance(source, dtype, step);
  }
}

// Whether the part of a tile that this thread has loaded (and waited for) has a NaN or Inf.
template <class T, int kCount, int kStride>
__device__ __forceinline__ bool ScanTile(const float* shared, int dim) {
  using Place = ChunkPlace<T>;
  const Place place;
  bool found = false;
  if (place.col >= dim) return found;
#pragma unroll 1
  for (int row = place.row; row < kCount; row += Place::kStep) {
    const float4 v = LoadShared4(shared + row * kStride + place.col);
    found |= NonFinite(v.x) | NonFinite(v.y) | NonFinite(v.z) | NonFinite(v.w);
  }
  return found;
}

}  // namespace attend::cuda
