// SPDX-License-Identifier: Apache-2.0
//
// cuda_decode_sm80: which tile serves which head dim and number of rows, the only place that tuning
// changes. Refers to device code, so only f16.cu and bf16.cu include it.

#pragma once

#include "kernels/cuda/decode/variants.cuh"

namespace attend::cuda::decode {

// 99 KiB is the smallest GPUs' limit.
template <class Element, class... Tiles>
std::span<const FlashVariant> Variants() {
  return VariantsWithin<Element, 99, Tiles...>();
}

template <class Element>
std::span<const FlashVariant> Table64(int rows) {
  using Last =
      Tile<TileConfig{.head_dim = 64, .row_warps = 1, .key_warps = 4, .stages = 3, .blocks = 2}>;
  if (rows <= 8) {
    return Variants<Element, Direct<DirectConfig{.head_dim = 64, .rows = 8, .blocks = 4}>>();
  }
  if (rows <= 16) {
    return Variants<Element, Direct<DirectConfig{.head_dim = 64, .rows = 16, .blocks = 3}>>();
  }
  if (rows <= 32) {
    return Variants<
        Element,
        Tile<TileConfig{.head_dim = 64, .row_warps = 2, .key_warps = 2, .stages = 3, .blocks = 3}>,
        Last>();
  }
  if (rows <= 64) {
    return Variants<Element,
                    Tile<TileConfig{.head_dim = 64, .row_warps = 4, .key_warps = 2, .stages = 6}>,
                    Last>();
  }
  return Variants<
      Element, Tile<TileConfig{.head_dim = 64, .row_warps = 8, .key_warps = 1, .stages = 6}>,
      Tile<TileConfig{.head_dim = 64, .row_warps = 8, .key_warps = 1, .stages = 4}>, Last>();
}

template <class Element>
std::span<const FlashVariant> Table128(int rows) {
  using Last = Tile<TileConfig{.head_dim = 128, .row_warps = 1, .key_warps = 4, .stages = 2}>;
  if (rows <= 8) {
    return Variants<Element, Direct<DirectConfig{.head_dim = 128, .rows = 8, .blocks = 2}>>();
  }
  if (rows <= 16) {
    return Variants<
        Element,
        Tile<TileConfig{.head_dim = 128, .row_warps = 1, .key_warps = 4, .stages = 3, .blocks = 2}>,
        Last>();
  }
  if (rows <= 32) {
    return Variants<
        Element,
        Tile<TileConfig{.head_dim = 128, .row_warps = 2, .key_warps = 2, .stages = 3, .blocks = 2}>,
        Last>();
  }
  if (rows <= 64) {
    return Variants<
        Element, Tile<TileConfig{.head_dim = 128, .row_warps = 4, .key_warps = 2, .stages = 5}>,
        Tile<TileConfig{.head_dim = 128, .row_warps = 4, .key_warps = 1, .stages = 2, .blocks = 2}>,
        Tile<TileConfig{
            .head_dim = 128, .row_warps = 4, .key_warps = 1, .keys = 32, .stages = 5, .blocks = 2}>,
        Last>();
  }
  return Variants<
      Element, Tile<TileConfig{.head_dim = 128, .row_warps = 8, .key_warps = 1, .stages = 3}>,
      Tile<TileConfig{.head_dim = 128, .row_warps = 8, .key_warps = 1, .keys = 32, .stages = 6}>,
      Tile<TileConfig{.head_dim = 128, .row_warps = 4, .key_warps = 1, .stages = 2, .blocks = 2}>,
      Last>();
}

template <class Element>
std::span<const FlashVariant> Table256(int rows) {
  using Last =
      Tile<TileConfig{.head_dim = 256, .row_warps = 1, .key_warps = 2, .keys = 32, .stages = 2}>;
  if (rows <= 8) {
    return Variants<Element, Direct<DirectConfig{.head_dim = 256, .rows = 8, .blocks = 2}>>();
  }
  if (rows <= 16) {
    return Variants<Element,
                    Tile<TileConfig{.head_dim = 256, .row_warps = 1, .key_warps = 4, .stages = 3}>,
                    Last>();
  }
  if (rows <= 32) {
    return Variants<Element,
                    Tile<TileConfig{.head_dim = 256, .row_warps = 2, .key_warps = 2, .stages = 3}>,
                    Last>();
  }
  if (rows <= 64) {
    return Variants<
        Element,
        Tile<TileConfig{.head_dim = 256, .row_warps = 4, .key_warps = 1, .keys = 32, .stages = 5}>,
        Last>();
  }
  return Variants<
      Element,
      Tile<TileConfig{.head_dim = 256, .row_warps = 8, .key_warps = 1, .keys = 32, .stages = 4}>,
      Last>();
}

template <class Element>
std::span<const FlashVariant> Table(int dim, int rows) {
  if (dim == 64) return Table64<Element>(rows);
  if (dim == 128) return Table128<Element>(rows);
  return Table256<Element>(rows);
}

}  // namespace attend::cuda::decode
