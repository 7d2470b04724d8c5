// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps of Q, K and V for Hopper's copy engine (TMA): tensors [B, H, L, D] of any strides,
// from which it loads boxes of rows x columns into shared memory, swizzled, with zeros beyond the
// tensor's ends. Host code, any thread.

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string_view>

#include "kernels/contract/problem.h"

namespace attend::cuda {

struct TensorMaps {
  CUtensorMap q, k, v;
  CUtensorMap o;  // O's, if writes_o; with a 16-bit bias, the bias's
  bool writes_o;  // dense layout, and TMA can address O
};

// Boxes of 64 columns have 128-byte rows and the 128-byte swizzle, those of 32 columns 64-byte rows
// and the 64-byte swizzle.
struct TensorBox {
  int rows = 0;  // 1..256
  int cols = 0;  // 32 or 64
};

// Exclusive upper bound of strides in bytes. TMA allows 2^40, but decoding stores the keys' strides
// as 32-bit counts of 16 bytes (decode/plan.h).
inline constexpr int64_t kTmaStrideMax = int64_t{1} << 36;

// Why Hopper's kernels cannot read Q, K and V in place, in static storage; "" if they can: bases
// and strides on 16-byte boundaries, strides positive (or 0 for a broadcast dimension other than
// rows) and below kTmaStrideMax, fewer than 2^31 rows; the same for pages. With dropout, rows must
// begin at a multiple of 16; with a 16-bit bias, LoadsBias.
std::string_view WhyNotTma(const Attention& attention);
inline bool TmaAligned(const Attention& attention) { return WhyNotTma(attention).empty(); }

// Whether the rows of the bias, unless there is none or it is a mask of bits, are 16-byte aligned.
bool LoadsBias(const Attention& attention);

struct TensorBoxes {
  TensorBox q, k, v, o;
};

// Rows of a box of keys in pages of `page_rows`, for tiles of `tile_rows`, a multiple of 16: the
// largest power of two that divides both, so that a box is in one page and boxes fill a tile.
ATTEND_HD constexpr int PageBoxRows(int page_rows, int tile_rows) {
  const int most = tile_rows & -tile_rows;
  return page_rows < most ? page_rows : most;
}

// Encodes the maps of a 16-bit attention that is TmaAligned. A dimension of stride 0 has one
// element and index 0 (BroadcastIndex). Paged K and V are tensors of as many pages as indices can
// name; their boxes have PageBoxRows of `boxes`. cudaErrorNotSupported: the driver has no tensor
// maps.
cudaError_t EncodeTensorMaps(const Attention& attention, const TensorBoxes& boxes,
                             TensorMaps* maps);

ATTEND_HD inline int BroadcastIndex(int64_t stride, int64_t index) {
  return stride == 0 ? 0 : static_cast<int>(index);
}

}  // namespace attend::cuda
