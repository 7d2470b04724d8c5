// SPDX-License-Identifier: Apache-2.0
//
// How Hopper's copy engine (TMA) sees Q, K and V: as tensors [B, H, L, D] of any strides, of which
// it loads boxes of rows x columns into shared memory, swizzled, with zeros beyond the tensor's
// ends. Host code, any thread.

#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string_view>

#include "kernels/contract/problem.h"

namespace attend::cuda {

struct TensorMaps {
  CUtensorMap q, k, v;
  CUtensorMap o;  // if writes_o; where a bias has 16 bits, the bias's
  bool writes_o;  // dense layout, and the copy engine can address O
};

// A box of 64 columns is stored in 128-byte rows under the 128-byte swizzle, one of 32 in 64-byte
// rows under the 64-byte swizzle.
struct TensorBox {
  int rows = 0;  // 1..256
  int cols = 0;  // 32 or 64
};

// Bytes that a stride is below. The copy engine takes 2^40, but decoding counts the keys' strides
// in units of 16 bytes, of which 32 bits hold fewer than 2^32 (decode/plan.h).
inline constexpr int64_t kTmaStrideMax = int64_t{1} << 36;

// Why Hopper's kernels cannot take Q, K and V where they are, in static storage; "" if they can:
// bases and strides on 16-byte boundaries, strides over 0 (or 0, of a broadcast dimension, not of
// rows) and below kTmaStrideMax, fewer than 2^31 rows; pages the same. Dropout: of rows from 16 n
// on; a bias of 16 bits: LoadsBias.
std::string_view WhyNotTma(const Attention& attention);
inline bool TmaAligned(const Attention& attention) { return WhyNotTma(attention).empty(); }

// Whether the rows of the bias, if there is one but for bits, begin at multiples of 16 bytes.
bool LoadsBias(const Attention& attention);

struct TensorBoxes {
  TensorBox q, k, v, o;
};

// Rows of a box of keys that are in pages of `page_rows`, if a tile has `tile_rows`, a multiple of
// 16: the most by which both can be divided, so that a box lies in one page and boxes fill a tile.
ATTEND_HD constexpr int PageBoxRows(int page_rows, int tile_rows) {
  const int most = tile_rows & -tile_rows;
  return page_rows < most ? page_rows : most;
}

// Describes an attention for which TmaAligned holds and whose dtype has 16 bits. A dimension of
// stride 0 is described by its only element; its index is always 0 (BroadcastIndex). K and V in
// pages are tensors of as many pages as numbers can name; their boxes have PageBoxRows of `boxes`.
// cudaErrorNotSupported: the driver has no tensor maps.
cudaError_t EncodeTensorMaps(const Attention& attention, const TensorBoxes& boxes,
                             TensorMaps* maps);

ATTEND_HD inline int BroadcastIndex(int64_t stride, int64_t index) {
  return stride == 0 ? 0 : static_cast<int>(index);
}

}  // namespace attend::cuda
