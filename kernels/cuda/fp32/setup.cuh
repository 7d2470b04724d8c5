// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_fp32: describes a tile, and copies Q, K and V, which may be paged, to shared memory.
// Device code; all threads of a block call each function of "load" together, one thread those of
// "setup".

#pragma once

#include "kernels/contract/limits.h"
#include "kernels/cuda/fp32/tile.cuh"
#include "kernels/cuda/ragged/tile_queue.cuh"

namespace attend::cuda {

// Description of a block's tile; the same for all its threads. Kept small, as it occupies registers
// beside the accumulators. Rows and keys within a sequence fit 32 bits (limits.h).
struct BlockWork {
  int b, h;
  int row_begin;             // first query row
  int q_len, k_len;          // true lengths
  int offset;                // of the diagonal
  int key_begin, key_end;    // keys that some row sees, begin rounded down to a tile
  int full_begin, full_end;  // keys that every row sees
  const void* k;             // row 0 of the sequence's keys and values, or of page 0
  const void* v;
  bool kv_aligned;  // FourAligned, both
  float unit;       // of the weights that multiply V: a power of two
};

// ---- setup --------------------------------------------------------------------------------------

__device__ __forceinline__ const void* FirstRow(const ConstTensorView& view, DType dtype, int64_t b,
                                                int64_t h, int64_t row) {
  return Advance(view.data, dtype, b * view.stride_b + h * view.stride_h + row * view.stride_l);
}

// Describes a tile of query rows; false if it has no work.
template <class T>
__device__ __forceinline__ bool SetUp(const Attention& a, const TileWork& tile, BlockWork& work) {
  const Problem& p = a.problem;
  work.b = tile.b;
  work.h = tile.h;
  const int64_t row_begin = tile.row_begin;
  const Sequence s = SequenceOf(a, work.b);
  if (row_begin >= s.q_rows) return false;
  work.row_begin = static_cast<int>(row_begin);
  work.unit = 1.0f;
  work.q_len = static_cast<int>(s.q_len);
  work.k_len = static_cast<int>(s.k_len);
  work.offset = static_cast<int>(s.offset);
  work.key_begin = work.key_end = work.full_begin = work.full_end = 0;
  const int64_t row_last = min(row_begin + T::kRows, s.q_len) - 1;
  if (row_last >= row_begin) {
    // Both ends of the visible range are monotonic in the row.
    const KeyRange first = VisibleKeys(p.mask, s, row_begin);
    const KeyRange last = VisibleKeys(p.mask, s, row_last);
    const int64_t begin = min(first.begin, s.k_len);
    work.key_begin = static_cast<int>(begin - begin % T::kKeys);
    work.key_end = static_cast<int>(max(last.end, int64_t{0}));
    work.full_begin = static_cast<int>(min(last.begin, s.k_len));
    work.full_end = static_cast<int>(max(first.end, int64_t{0}));
  }
  const int64_t kv_head = work.h / p.group();
  const int64_t dense_b = T::kPaged ? 0 : work.b;
  work.k = FirstRow(a.k, p.dtype, dense_b, kv_head, s.k_row);
  work.v = FirstRow(a.v, p.dtype, dense_b, kv_head, s.k_row);
  work.kv_aligned = FourAligned(work.k, p.dtype, a.k.stride_l, p.dim) &&
                    FourAligned(work.v, p.dtype, a.v.stride_l, p.dim_v);
  if (T::kPaged) work.kv_aligned &= a.k.stride_b % 4 == 0 && a.v.stride_b % 4 == 0;
  return true;
}

// ---- load ---------------------------------------------------------------------------------------

__device__ __forceinline__ Rows QueryRows(const Attention& a, const BlockWork& work) {
  const Problem& p = a.problem;
  const int64_t row = SequenceOf(a, work.b).q_row + work.row_begin;
  const void* data = FirstRow(a.q, p.dtype, work.b, work.h, row);
  return {data, a.q.stride_l, work.q_len - work.row_begin, static_cast<int>(p.dim),
          FourAligned(data, p.dtype, a.q.stride_l, p.dim)};
}

// Keys (or values) from `key` on.
__device__ __forceinline__ Rows KeyRows(const Attention& a, const BlockWork& work, int key) {
  return {Advance(work.k, a.problem.dtype, key * a.k.stride_l), a.k.stride_l, work.k_len - key,
          static_cast<int>(a.problem.dim), work.kv_aligned};
}
__device__ __forceinline__ Rows ValueRows(const Attention& a, const BlockWork& work, int key) {
  return {Advance(work.v, a.problem.dtype, key * a.v.stride_l), a.v.stride_l, work.k_len - key,
          static_cast<int>(a.problem.dim_v), work.kv_aligned};
}

// Page sizes are multiples of this.
inline constexpr int kPageRun = static_cast<int>(kPageRowsMin);

// Calls run(n, rows) for each run of kPageRun rows of the tile that starts at `key`; n is the run's
// first row within the tile.
template <class T, class Run>
__device__ __forceinline__ void ForRuns(const Attention& a, const BlockWork& work, const Rows& of,
                                        const ConstTensorView& view, int key, const Run& run) {
  const int rows = static_cast<int>(a.problem.page_rows);
  const int32_t* const pages = a.kv_pages.pages + work.b * a.kv_pages.stride;
#pragma unroll 1
  for (int n = 0; n < T::kKeys; n += kPageRun) {
    const int first = key + n;
    Rows part = of;
    part.valid = work.k_len - first;
    if (part.valid > 0) {
      const int64_t at = pages[first / rows] * view.stride_b + first % rows * view.stride_l;
      part.data = Advance(of.data, a.problem.dtype, at);
    }
    run(n, part);
  }
}

// Loads the tile of K (or V) that starts at `key` into shared memory.
template <class T, int kStride, bool kGeneral>
__device__ __forceinline__ void LoadKeys(float* shared, const Attention& a, const BlockWork& work,
                                         int key) {
  const DType dtype = a.problem.dtype;
  if constexpr (!T::kPaged) {
    LoadTile<T, T::kKeys, kStride, kGeneral>(shared, KeyRows(a, work, key), dtype);
  } else {
    ForRuns<T>(a, work, KeyRows(a, work, 0), a.k, key, [&](int n, const Rows& rows) {
      LoadTile<T, kPageRun, kStride, kGeneral>(shared + n * kStride, rows, dtype);
    });
  }
}
template <class T, int kStride, bool kGeneral>
__device__ __forceinline__ void LoadValues(float* shared, const Attention& a, const BlockWork& work,
                                           int key) {
  const DType dtype = a.problem.dtype;
  if constexpr (!T::kPaged) {
    LoadTile<T, T::kKeys, kStride, kGeneral>(shared, ValueRows(a, work, key), dtype);
  } else {
    ForRuns<T>(a, work, ValueRows(a, work, 0), a.v, key, [&](int n, const Rows& rows) {
      LoadTile<T, kPageRun, kStride, kGeneral>(shared + n * kStride, rows, dtype);
    });
  }
}

// Whether the part of a V tile that this thread loaded has a NaN or Inf.
template <class T>
__device__ __forceinline__ bool ScanValues(const float* shared, int dim) {
  if constexpr (!T::kPaged) return ScanTile<T, T::kKeys, T::kDim>(shared, dim);
  bool found = false;
#pragma unroll 1
  for (int n = 0; n < T::kKeys; n += kPageRun) {
    found |= ScanTile<T, kPageRun, T::kDim>(shared + n * T::kDim, dim);
  }
  return found;
}

}  // namespace attend::cuda
