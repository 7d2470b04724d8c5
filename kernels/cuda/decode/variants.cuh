// SPDX-License-Identifier: Apache-2.0
//
// Builds the list of compiled variants of a decoding kernel from its table of tiles. Refers to
// device code.

#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <tuple>

#include "kernels/cuda/decode/instances.h"
#include "kernels/cuda/decode/kernel.cuh"

namespace attend::cuda::decode {

// "rows8_keys64_threads128_direct", "rows32_keys64_threads128_stages3",
// "rows64_keys128_threads256_wgmma3"
template <class T>
std::string NameOf() {
  const std::string name = "rows" + std::to_string(T::kRows) + "_keys" + std::to_string(T::kKeys) +
                           "_threads" + std::to_string(T::kBlockThreads);
  if constexpr (T::kDirect) {
    return name + "_direct";
  } else {
    if (T::kPlaces > 0) return name + "_ring" + std::to_string(T::kPlaces);
    return name + (T::kWgmma ? "_wgmma" : "_stages") + std::to_string(T::kStages);
  }
}

// A block's shared memory: the kernel's own, SumBefore's too, and from the next multiple of 128 on
// the launch's.
template <class T>
inline constexpr size_t kOwnBytes = sizeof(SharedOf<T>) + T::kBlockThreads / 32 * sizeof(int64_t);
template <class T>
inline constexpr int kBlockBytes = T::kSharedBytes +
                                   static_cast<int>((kOwnBytes<T> + 127) / 128 * 128);

template <class T, class Element>
FlashVariant Variant() {
  static const std::string name = NameOf<T>();
  FlashVariant variant;
  variant.name = name;
  variant.rows = T::kRows;
  variant.keys = T::kKeys;
  variant.threads = T::kBlockThreads;
  variant.shared_bytes = T::kSharedBytes;
  variant.block_bytes = kBlockBytes<T>;
  variant.blocks = T::kBlocks;
  variant.kernel = reinterpret_cast<const void*>(&DecodeKernel<T, Element>);
  variant.columns = T::kDim;
  return variant;
}

// Best first. The last one runs everywhere: it fits kKibibytes of shared memory.
template <class Element, int kKibibytes, class... Tiles>
std::span<const FlashVariant> VariantsWithin() {
  using Last = std::tuple_element_t<sizeof...(Tiles) - 1, std::tuple<Tiles...>>;
  static_assert(kBlockBytes<Last> <= kKibibytes * 1024);
  static const FlashVariant variants[] = {Variant<Tiles, Element>()...};
  return variants;
}

}  // namespace attend::cuda::decode
