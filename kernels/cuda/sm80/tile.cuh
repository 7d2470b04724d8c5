// SPDX-License-Identifier: Apache-2.0
//
// Geometry of cuda_flash_sm80's tiles, and data movement: which thread copies which part of Q, K
// and V to shared memory. Device code; all threads of a block call each function together.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ptx/mma.cuh"

namespace attend::cuda::sm80 {

// Compile-time configuration of a tile. A block computes warps * slices * 16 query rows; a warp has
// all keys of its slices, so that the softmax needs no other warp.
struct TileConfig {
  int head_dim;           // upper bound of D and Dv: a multiple of 32
  int slices;             // per warp, of 16 query rows (mma.sync's M)
  int keys;               // per tile of K or V: a multiple of 16, mma.sync's step of P V
  int warps = 4;          // per block
  int blocks = 2;         // per multiprocessor
  int stages = 2;         // tiles of K in shared memory, and as many of V: 1 or 2
  int query_columns = 0;  // leading columns of Q, a multiple of 16, whose fragments stay in
                          // registers; the others are read from shared memory for each key tile
  bool paged = false;     // K and V are paged
  bool dropout = false;   // applies dropout
};

constexpr TileConfig InPages(TileConfig config) {
  config.paged = true;
  return config;
}

template <TileConfig kConfig>
struct Tile {
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kWarps = kConfig.warps;
  static constexpr int kSlices = kConfig.slices;
  static constexpr int kKeys = kConfig.keys;
  static constexpr int kBlocks = kConfig.blocks;
  static constexpr int kQueryColumns = kConfig.query_columns;
  static constexpr bool kPaged = kConfig.paged;
  static constexpr bool kDropout = kConfig.dropout;
  using Paged = Tile<InPages(kConfig)>;

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kSlices;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kThreadRows = 2 * kSlices;  // rows of which a thread has a part
  static constexpr int kDimSteps = kDim / 16;
  static constexpr int kKeyBlocks = kKeys / 8;
  static constexpr int kQuerySteps = kQueryColumns / 16;  // of kDimSteps

  using Row = TileRow<kDim>;
  static constexpr int kStages = kConfig.stages;
  static_assert(kStages == 1 || kStages == 2);
  // Whether the next tile's copies start before this one's scores, or after, when computing their
  // addresses costs no time (measured: better if a tile has many products). With one stage, its
  // memory is not free earlier.
  static constexpr bool kCopyFirst = kStages == 2 && kDim <= 96;
  static constexpr int kTileBytes = kKeys * Row::kBytes;  // of K or V
  static constexpr int kOffsetK = kRows * Row::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStages * kTileBytes;
  static constexpr int kSharedBytes = kOffsetV + kStages * kTileBytes;
  static constexpr int kReferenceBytes = 4 * kRows;  // of far rows, in addition

  // A pass of copies: adjacent threads copy each row's span of chunks.
  static constexpr int kPassRows = kThreads / Row::kSpan;
  static constexpr int kPassSpans = Row::kChunks / Row::kSpan;
  static_assert(kPassRows % 8 == 0 && kRows % kPassRows == 0 && kKeys % kPassRows == 0);
  static_assert(kKeys % 16 == 0 && kDim % 32 == 0);
  static_assert(kQueryColumns % 16 == 0 && kQueryColumns <= kDim);
};

// Rows of Q, K or V of one head.
struct Source {
  const char* data;  // row 0 of the sequence
  int64_t stride;    // bytes between rows
  int dim;           // actual columns
  bool fast;         // 16-byte aligned, with strides that fit 32 bits
};

__device__ __forceinline__ Source SourceOf(const ConstTensorView& view, int64_t b, int64_t h,
                                           int64_t row, int64_t dim) {
  Source source;
  source.data = static_cast<const char*>(view.data) +
                2 * (b * view.stride_b + h * view.stride_h + row * view.stride_l);
  source.stride = 2 * view.stride_l;
  source.dim = static_cast<int>(dim);
  source.fast = ((reinterpret_cast<uint64_t>(source.data) | source.stride) & 15) == 0 &&
                dim % 8 == 0 && static_cast<int>(source.stride) == source.stride;
  return source;
}

// Copies asynchronously. kWhole: all rows and columns exist.
template <class T, int kCount, bool kWhole>
__device__ __forceinline__ void CopyRows(uint32_t shared, const char* data, int stride, int rows,
                                         int columns) {
  using Row = typename T::Row;
#pragma unroll
  for (int pass = 0; pass < kCount / T::kPassRows; ++pass) {
#pragma unroll
    for (int span = 0; span < T::kPassSpans; ++span) {
      const int chunk = span * Row::kSpan;
      CopyAsync16(shared + pass * T::kPassRows * Row::kBytes + 16 * chunk, data + 16 * chunk,
                  kWhole || (pass * T::kPassRows < rows && 8 * chunk < columns));
    }
    data += int64_t{T::kPassRows} * stride;
  }
}

// Copies the kCount rows from `row` on to shared memory, with zeros for rows at or beyond `rows`
// and missing columns. Asynchronous if the data are aligned for it.
template <class T, int kCount>
__device__ __forceinline__ void LoadRows(uint32_t shared, const Source& source, int row, int rows) {
  using Row = typename T::Row;
  const int thread = ThreadIndex();
  const int copy_row = thread / Row::kSpan;
  const int copy_chunk = thread % Row::kSpan;
  shared += Row::Offset(copy_row, copy_chunk);
  const int first = row + copy_row;
  if (source.fast) {
    const auto stride = static_cast<int>(source.stride);
    const char* data = source.data + int64_t{first} * stride + 16 * copy_chunk;
    if (row + kCount <= rows && source.dim == T::kDim) {
      CopyRows<T, kCount, true>(shared, data, stride, 0, 0);
    } else {
      CopyRows<T, kCount, false>(shared, data, stride, rows - first, source.dim - 8 * copy_chunk);
    }
    return;
  }
  const char* data = source.data + first * source.stride + 16 * copy_chunk;
#pragma unroll 1
  for (int pass = 0; pass < kCount / T::kPassRows; ++pass) {
#pragma unroll 1
    for (int chunk = 0; chunk < Row::kChunks; chunk += Row::kSpan) {
      const bool valid = first + pass * T::kPassRows < rows;
      const int columns = valid ? source.dim - 8 * (copy_chunk + chunk) : 0;
      StoreShared16(shared + 16 * chunk, LoadPiecewise(data + 16 * chunk, columns));
    }
    shared += T::kPassRows * Row::kBytes;
    data += T::kPassRows * source.stride;
  }
}

// Paged keys of one sequence and head.
struct PageSource {
  const int32_t* numbers;
  int shift;         // log2 of a page's rows
  int64_t stride_k;  // bytes between pages
  int64_t stride_v;
};

// LoadRows for a paged tile of keys or values; `source` describes page 0.
template <class T>
__device__ __forceinline__ void LoadPages(uint32_t shared, const Source& source,
                                          const PageSource& pages, int64_t page_stride, int row,
                                          int rows) {
  using Row = typename T::Row;
  const int thread = ThreadIndex();
  const int copy_row = thread / Row::kSpan;
  const int copy_chunk = thread % Row::kSpan;
  shared += Row::Offset(copy_row, copy_chunk);
  const int first = row + copy_row;
  const int in_page = (1 << pages.shift) - 1;
  const int32_t* const numbers = pages.numbers;
#pragma unroll
  for (int pass = 0; pass < T::kKeys / T::kPassRows; ++pass) {
    const int mine = first + pass * T::kPassRows;
    const bool valid = mine < rows;
    const int64_t page = valid ? __ldg(numbers + (mine >> pages.shift)) : 0;
    const char* data =
        source.data + page * page_stride + (mine & in_page) * source.stride + 16 * copy_chunk;
#pragma unroll
    for (int span = 0; span < T::kPassSpans; ++span) {
      const int chunk = span * Row::kSpan;
      const int columns = valid ? source.dim - 8 * (copy_chunk + chunk) : 0;
      const uint32_t to = shared + pass * T::kPassRows * Row::kBytes + 16 * chunk;
      if (source.fast) {
        CopyAsync16(to, data + 16 * chunk, columns > 0);
      } else {
        StoreShared16(to, LoadPiecewise(data + 16 * chunk, columns));
      }
    }
  }
}

}  // namespace attend::cuda::sm80
