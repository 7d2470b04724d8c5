// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90: which tiles are compiled, and which a problem gets. Included by the file of each
// dtype.

#pragma once

#include <algorithm>
#include <span>
#include <string_view>

#include "kernels/cuda/flash_sm90_kernel.cuh"
#include "kernels/cuda/ragged.h"

namespace attend::cuda {

// Chosen by racing them on an H200 (README.md): D, Dv, warpgroups, keys, stages of K and V, of Q,
// turns, blocks to a multiprocessor.
using Sm90D64Short = Sm90Tile<64, 64, 1, 128, 2, 2, false, 2>;
using Sm90D64Long = Sm90Tile<64, 64, 3, 112, 2, 2, false, 1>;
using Sm90D96 = Sm90Tile<96, 96, 3, 80, 3, 2, false, 1>;
using Sm90D128 = Sm90Tile<128, 128, 2, 128, 2, 2, true, 1>;
using Sm90D192V128 = Sm90Tile<192, 128, 2, 112, 2, 1, false, 1>;
using Sm90D192 = Sm90Tile<192, 192, 2, 112, 2, 1, false, 1>;
using Sm90D256 = Sm90Tile<256, 256, 2, 80, 2, 1, false, 1>;

// Keys from which on a tile of more rows pays.
inline constexpr int64_t kSm90LongKeys = 8192;

template <class T, bool kBfloat16>
FlashVariant Sm90Variant(std::string_view name) {
  FlashVariant variant;
  variant.name = name;
  variant.rows = T::kRows;
  variant.keys = T::kKeys;
  variant.threads = T::kThreads;
  variant.shared_bytes = kSm90SharedBytes<T>;
  variant.blocks = T::kBlocks;
  variant.kernel = reinterpret_cast<const void*>(&FlashSm90Kernel<T, kBfloat16>);
  variant.tensor_maps = true;
  variant.boxes.q = {T::kRows, T::kCols};
  variant.boxes.k = {T::kKeys, T::kCols};
  variant.boxes.v = {T::kKeys, T::kColsV};
  if (T::kStoreThroughQ) variant.boxes.o = {64, T::kColsV};
  return variant;
}

template <bool kBfloat16>
std::span<const FlashVariant> Sm90Variants(const Problem& p) {
  static const FlashVariant d64[] = {
      Sm90Variant<Sm90D64Short, kBfloat16>("d64_rows64_keys128_blocks2"),
      Sm90Variant<Sm90D64Long, kBfloat16>("d64_rows192_keys112"),
  };
  static const FlashVariant d64_long[] = {d64[1], d64[0]};
  static const FlashVariant d96[] = {Sm90Variant<Sm90D96, kBfloat16>("d96_rows192_keys80")};
  static const FlashVariant d128[] = {Sm90Variant<Sm90D128, kBfloat16>("d128_rows128_keys128")};
  static const FlashVariant d192_v128[] = {
      Sm90Variant<Sm90D192V128, kBfloat16>("d192_v128_rows128_keys112")};
  static const FlashVariant d192[] = {Sm90Variant<Sm90D192, kBfloat16>("d192_rows128_keys112")};
  static const FlashVariant d256[] = {Sm90Variant<Sm90D256, kBfloat16>("d256_rows128_keys80")};
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (dim <= 64) {
    return p.len_k < kSm90LongKeys ? std::span<const FlashVariant>(d64) : d64_long;
  }
  if (dim <= 96) return d96;
  if (dim <= 128) return d128;
  if (dim <= 192) {
    return p.dim_v <= 128 ? std::span<const FlashVariant>(d192_v128) : d192;
  }
  return d256;
}

}  // namespace attend::cuda
