// SPDX-License-Identifier: Apache-2.0
//
// The order in which tiles of a ragged launch (ragged.h) are numbered and so started. Shared by
// host and device: tests run the same mapping from tile numbers as blocks do.

#pragma once

#include <bit>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

// A section's K and V should fit the L2 cache (Ampere's 40 MB, Hopper's 50 MB).
inline constexpr int64_t kSectionBytes = int64_t{40} << 20;
// Lower bound of a section's tiles: the multiprocessors (132 on Hopper) finish together only if
// enough short tiles follow the longest ones to fill the gaps.
inline constexpr int64_t kSectionTilesMin = 400;
// The same for sections of few heads, whose tiles are long: blocks of cuda_flash_sm90 claim up to
// two tiles beyond the one that they compute, so that more short tiles must follow.
inline constexpr int64_t kFewHeads = 16;
inline constexpr int64_t kFewHeadsTilesMin = 1024;

// The tiles of `heads` heads (counted over sequences from `b` on, Hq per sequence), row_tiles per
// head, in this order: sections of heads; within a section the last rows first (under a causal mask
// they see most keys), with the heads of equal rows adjacent.
struct TileGroup {
  int32_t first_tile = 0;  // in the launch
  int32_t heads = 0;
  int32_t row_tiles = 0;
  int32_t section = 1;  // heads per section
  int32_t problem = 0;  // index of the attention
  int32_t b = 0;
};

struct TileWork {
  const Attention* attention;
  int32_t problem;  // index of the attention
  int32_t b;
  int32_t h;
  int32_t row_begin;
};

// Orders a group of `heads` heads whose longest sequence has q_rows rows of O and k_len keys, for
// tiles of `rows` rows.
ATTEND_HD inline void OrderTiles(const Problem& p, int64_t q_rows, int64_t k_len, int rows,
                                 TileGroup& group) {
  group.row_tiles = static_cast<int32_t>((q_rows + rows - 1) / rows);
  // Without a mask all tiles of a head cost the same, and one head at a time caches best.
  group.section = 1;
  if (p.mask.unrestricted()) return;
  const int64_t head_bytes = (k_len + 1) * (p.dim + p.dim_v) * DTypeBytes(p.dtype) / p.group();
  int64_t section = p.group();
  while (section < group.heads) {
    const int64_t tiles_min = 2 * section <= kFewHeads ? kFewHeadsTilesMin : kSectionTilesMin;
    const bool fits = 2 * section * head_bytes <= kSectionBytes;
    if (!fits && section * group.row_tiles >= tiles_min) break;
    section *= 2;
  }
  group.section = section < group.heads ? static_cast<int32_t>(section) : group.heads;
}

struct Quotient {
  int whole;
  int rest;
};

// Division of non-negative numbers. If b is a power of two it is a shift, which has a fraction of a
// division's latency: one thread computes all this while others wait.
ATTEND_HD inline Quotient Divide(int a, int b) {
  const auto dividend = static_cast<unsigned>(a);
  const auto divisor = static_cast<unsigned>(b);
#ifdef __CUDA_ARCH__
  const bool power = __popc(divisor) == 1;
  const int shift = __ffs(b) - 1;
#else
  const bool power = std::has_single_bit(divisor);
  const int shift = std::countr_zero(divisor);
#endif
  const int whole = static_cast<int>(power ? dividend >> shift : dividend / divisor);
  return {whole, a - whole * b};
}

// Locates tile number `tile` of the group.
ATTEND_HD inline void PlaceTile(const TileGroup& group, int64_t heads_q, int tile, int rows,
                                TileWork& work) {
  const Quotient section = Divide(tile - group.first_tile, group.section * group.row_tiles);
  const int head_begin = section.whole * group.section;
  const int heads_left = group.heads - head_begin;
  const Quotient place =
      Divide(section.rest, group.section < heads_left ? group.section : heads_left);
  const Quotient head = Divide(head_begin + place.rest, static_cast<int>(heads_q));
  work.problem = group.problem;
  work.b = group.b + head.whole;
  work.h = head.rest;
  work.row_begin = (group.row_tiles - 1 - place.whole) * rows;
}

}  // namespace attend::cuda
