// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90: the compiled tiles, and which a problem gets. Included by each dtype's source.

#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/sm90/kernel.cuh"

namespace attend::cuda {

// Chosen by benchmark on an H200 (README.md).
using Sm90D64 = Sm90Tile<Sm90Config{
    .head_dim = 64, .warpgroups = 4, .keys = 64, .stages = 8, .overlap = Overlap::kOutputTurns}>;
// For few tiles; and for few tiles with many keys.
using Sm90D64Few = Sm90Tile<Sm90Config{.head_dim = 64,
                                       .warpgroups = 1,
                                       .keys = 64,
                                       .stages = 5,
                                       .query_in_registers = true,
                                       .blocks = 2}>;
using Sm90D64FewLong =
    Sm90Tile<Sm90Config{.head_dim = 64, .keys = 64, .stages = 8, .query_in_registers = true}>;
using Sm90D96 = Sm90Tile<Sm90Config{
    .head_dim = 96, .warpgroups = 3, .keys = 96, .stages = 3, .overlap = Overlap::kSoftmaxTurns}>;
using Sm90D128 = Sm90Tile<Sm90Config{
    .head_dim = 128, .keys = 128, .overlap = Overlap::kOutputTurns, .query_in_registers = true}>;
using Sm90D192V128 = Sm90Tile<Sm90Config{.head_dim = 192,
                                         .value_dim = 128,
                                         .keys = 128,
                                         .query_stages = 1,
                                         .overlap = Overlap::kSoftmaxTurns}>;
using Sm90D192 = Sm90Tile<Sm90Config{
    .head_dim = 192, .keys = 112, .query_stages = 1, .overlap = Overlap::kOutputTurns}>;
using Sm90D256 = Sm90Tile<Sm90Config{.head_dim = 256, .keys = 80, .query_stages = 1}>;
// Dropout needs registers: fewer warpgroups, and Q in shared memory.
using Sm90D64Dropout =
    Sm90Tile<Sm90Config{.head_dim = 64, .keys = 128, .stages = 3, .dropout = true}>;
using Sm90D128Dropout = Sm90Tile<Sm90Config{.head_dim = 128, .keys = 128, .dropout = true}>;

// So does a mask of bits.
using Sm90D64Bits = Sm90Tile<Sm90Config{
    .head_dim = 64, .keys = 128, .stages = 3, .overlap = Overlap::kOutputTurns, .bits = true}>;
using Sm90D128Bits = Sm90Tile<Sm90Config{
    .head_dim = 128, .keys = 128, .overlap = Overlap::kOutputTurns, .bits = true}>;

// A 16-bit bias needs registers and shared memory.
using Sm90D64Bias = Sm90Tile<Sm90Config{.head_dim = 64,
                                        .warpgroups = 3,
                                        .keys = 96,
                                        .stages = 4,
                                        .overlap = Overlap::kOutputTurns,
                                        .bias_stages = 2}>;
using Sm90D128Bias = Sm90Tile<Sm90Config{.head_dim = 128,
                                         .keys = 128,
                                         .overlap = Overlap::kOutputTurns,
                                         .query_in_registers = true,
                                         .bias_stages = 1}>;

// ALiBi and O in float32.
using Sm90D64General = Sm90Tile<Sm90Config{.head_dim = 64,
                                           .warpgroups = 4,
                                           .keys = 64,
                                           .stages = 8,
                                           .overlap = Overlap::kOutputTurns,
                                           .general = true}>;
using Sm90D128General = Sm90Tile<Sm90Config{.head_dim = 128,
                                            .keys = 128,
                                            .overlap = Overlap::kOutputTurns,
                                            .query_in_registers = true,
                                            .general = true}>;

// Number of keys from which Sm90D64FewLong pays.
inline constexpr int64_t kSm90LongKeys = 2048;

// "d64_rows256_keys64_turns"
template <class T>
std::string Sm90Name() {
  std::string name = "d";
  name += std::to_string(T::kD);
  if (T::kDv != T::kD) name += "_v" + std::to_string(T::kDv);
  name += "_rows" + std::to_string(T::kRows) + "_keys" + std::to_string(T::kKeys);
  if (T::kOverlap == Overlap::kOutputTurns) name += "_turns";
  if (T::kOverlap == Overlap::kSoftmaxTurns) name += "_softmax_turns";
  if (T::kQueryInRegisters) name += "_q_registers";
  if (T::kBlocks > 1) name += "_blocks" + std::to_string(T::kBlocks);
  if (T::kDropout) name += "_dropout";
  if (T::kBits) name += "_bits";
  if (T::kBias) name += "_bias";
  if (T::kGeneral) name += "_general";
  return name;
}

template <class T, bool kBfloat16>
FlashVariant Sm90Variant() {
  static_assert(kSm90SharedBytes<T> <= kSm90SharedBytesMax);
  static const std::string name = Sm90Name<T>();
  FlashVariant variant = MakeVariant<T>(
      name, reinterpret_cast<const void*>(&FlashSm90Kernel<T, kBfloat16>), kSm90SharedBytes<T>);
  variant.tensor_maps = true;
  variant.begins_early = true;
  variant.boxes.q = {T::kRows, T::kCols};
  variant.boxes.k = {T::kKeys, T::kCols};
  variant.boxes.v = {T::kKeys, T::kColsV};
  if (T::kStoreThroughQ) variant.boxes.o = {64, T::kColsV};
  if (T::kBias) variant.boxes.o = {T::kBiasRows, T::kBiasCols};  // the bias's box
  return variant;
}

// The tiles for one pair of head dims, the preferred one first. All take the same number of keys at
// a time, in the same order, and so give the same bits (alone_test.cc): a batch may choose any.
template <bool kBfloat16, class First, class... T>
std::span<const FlashVariant> Sm90List() {
  static_assert(((T::kKeys == First::kKeys) && ...));
  static const FlashVariant list[] = {Sm90Variant<First, kBfloat16>(),
                                      Sm90Variant<T, kBfloat16>()...};
  return list;
}

template <bool kBfloat16>
std::span<const FlashVariant> Sm90ListD64(const Problem& p) {
  if (!Sm90HasFewTiles(p)) {
    return Sm90List<kBfloat16, Sm90D64, Sm90D64Few, Sm90D64FewLong>();
  }
  return p.len_k < kSm90LongKeys ? Sm90List<kBfloat16, Sm90D64Few, Sm90D64, Sm90D64FewLong>()
                                 : Sm90List<kBfloat16, Sm90D64FewLong, Sm90D64Few, Sm90D64>();
}

// With a 16-bit bias: in separate sources, which compile in parallel.
template <bool kBfloat16>
std::span<const FlashVariant> Sm90BiasVariants(const Problem& p) {
  return std::max(p.dim, p.dim_v) <= 64 ? Sm90List<kBfloat16, Sm90D64Bias>()
                                        : Sm90List<kBfloat16, Sm90D128Bias>();
}

// Likewise for the general kernels.
template <bool kBfloat16>
std::span<const FlashVariant> Sm90GeneralVariants(const Problem& p) {
  return std::max(p.dim, p.dim_v) <= 64 ? Sm90List<kBfloat16, Sm90D64General>()
                                        : Sm90List<kBfloat16, Sm90D128General>();
}

template <bool kBfloat16>
std::span<const FlashVariant> Sm90Variants(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (p.dropout > 0) {
    return dim <= 64 ? Sm90List<kBfloat16, Sm90D64Dropout>()
                     : Sm90List<kBfloat16, Sm90D128Dropout>();
  }
  if (p.bias_bits) {
    return dim <= 64 ? Sm90List<kBfloat16, Sm90D64Bits>() : Sm90List<kBfloat16, Sm90D128Bits>();
  }
  if (dim <= 64) return Sm90ListD64<kBfloat16>(p);
  if (dim <= 96) return Sm90List<kBfloat16, Sm90D96>();
  if (dim <= 128) return Sm90List<kBfloat16, Sm90D128>();
  if (dim > 192) return Sm90List<kBfloat16, Sm90D256>();
  return p.dim_v <= 128 ? Sm90List<kBfloat16, Sm90D192V128>() : Sm90List<kBfloat16, Sm90D192>();
}

}  // namespace attend::cuda
