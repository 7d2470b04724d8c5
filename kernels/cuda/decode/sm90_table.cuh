// SPDX-License-Identifier: Apache-2.0
//
// cuda_decode_sm90: which tile serves which head dim and number of rows, the only place that tuning
// changes. Refers to device code, so only sm90_f16.cu and sm90_bf16.cu include it.

#pragma once

#include "kernels/cuda/decode/variants.cuh"

namespace attend::cuda::decode {

// Within a block's shared memory on Hopper.
template <class Element, class... Tiles>
std::span<const FlashVariant> HopperVariants() {
  return VariantsWithin<Element, 227, Tiles...>();
}

template <class Element>
std::span<const FlashVariant> HopperTable64(int rows) {
  if (rows <= 64) {
    return HopperVariants<Element, Tile<TileConfig{.head_dim = 64,
                                                   .row_warps = 4,
                                                   .key_warps = 1,
                                                   .keys = 128,
                                                   .stages = 3,
                                                   .blocks = 2,
                                                   .wgmma = true}>>();
  }
  return HopperVariants<
      Element,
      Tile<TileConfig{
          .head_dim = 64, .row_warps = 8, .key_warps = 1, .keys = 128, .wgmma = true, .places = 8}>,
      Tile<TileConfig{.head_dim = 64,
                      .row_warps = 8,
                      .key_warps = 1,
                      .keys = 128,
                      .stages = 5,
                      .wgmma = true}>>();
}

template <class Element>
std::span<const FlashVariant> HopperTable128(int rows) {
  if (rows <= 64) {
    return HopperVariants<Element, Tile<TileConfig{.head_dim = 128,
                                                   .row_warps = 4,
                                                   .key_warps = 2,
                                                   .keys = 128,
                                                   .stages = 3,
                                                   .wgmma = true}>>();
  }
  return HopperVariants<Element,
                        Tile<TileConfig{.head_dim = 128,
                                        .row_warps = 8,
                                        .key_warps = 1,
                                        .keys = 128,
                                        .wgmma = true,
                                        .places = 5}>,
                        Tile<TileConfig{.head_dim = 128,
                                        .row_warps = 8,
                                        .key_warps = 1,
                                        .keys = 128,
                                        .stages = 2,
                                        .wgmma = true}>>();
}

template <class Element>
std::span<const FlashVariant> HopperTable256(int rows) {
  if (rows <= 64) {
    return HopperVariants<Element, Tile<TileConfig{.head_dim = 256,
                                                   .row_warps = 4,
                                                   .key_warps = 2,
                                                   .keys = 64,
                                                   .stages = 2,
                                                   .wgmma = true}>>();
  }
  return HopperVariants<Element, Tile<TileConfig{.head_dim = 256,
                                                 .row_warps = 8,
                                                 .key_warps = 1,
                                                 .keys = 32,
                                                 .stages = 4,
                                                 .wgmma = true}>>();
}

template <class Element>
std::span<const FlashVariant> HopperTable(int dim, int rows) {
  if (dim == 64) return HopperTable64<Element>(rows);
  if (dim == 128) return HopperTable128<Element>(rows);
  return HopperTable256<Element>(rows);
}

}  // namespace attend::cuda::decode
