// SPDX-License-Identifier: Apache-2.0
//
// The decoding path of cpu_flash: few query rows against many keys. K and V are read once, in
// place. The keys of each KV head are cut into splits, which threads compute. Whether a sequence is
// decoded (decode_rule.h) and where its keys are cut depend on its problem alone, so its bits do
// too.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/decode_rule.h"
#include "kernels/contract/problem.h"
#include "kernels/cpu/flash_tile.h"

namespace attend::cpu_flash {

// Fewest keys of a split. It keeps a partial small next to its keys: a few per cent of their bytes
// at ordinary head dimensions. A split is whole key tiles.
inline constexpr int64_t kSplitKeysMin = 512;
static_assert(kSplitKeysMin % kKeyTile == 0);

// Most splits of one KV head. It bounds the memory of partials at any length.
inline constexpr int64_t kSplitsMax = 65;

// A tile of all true rows of one KV head's query heads.
inline Tile DecodeTile(const Attention& a, const Sequence& s, int64_t b, int64_t h_kv) {
  const int64_t group = a.problem.group();
  return {&a, b, h_kv * group, group, 0, s.q_len, 0.0, nullptr, true};
}

// Split n of `count` is keys [(first + n) * keys, (first + n + 1) * keys), clipped to those seen.
// There is always at least one split, possibly empty.
struct Splits {
  KeyRange seen;
  int64_t first;
  int64_t count;
  int64_t keys;

  KeyRange operator[](int64_t n) const {
    return {std::max(seen.begin, (first + n) * keys), std::min(seen.end, (first + n + 1) * keys)};
  }
};

inline Splits SplitsOf(const Problem& p, const Sequence& s) {
  constexpr int64_t kWhole = (kSplitsMax - 1) * kKeyTile;
  const KeyRange seen = SeenKeys(p, s);
  const int64_t least = (seen.end - seen.begin + kWhole - 1) / kWhole * kKeyTile;
  const int64_t keys = std::max(kSplitKeysMin, least);
  const int64_t first = seen.begin / keys;
  return {seen, first, std::max<int64_t>(1, (seen.end + keys - 1) / keys - first), keys};
}

// A partial is the state over one split: for each row of the tile its max, its sum, its outcome
// (kFinite, ...) and its undivided O, whose order depends on the instruction set.
inline int64_t PartialRowFloats(int64_t dim_v) { return 3 + (dim_v + 31) / 32 * 32; }
inline int64_t PartialFloats(const Tile& tile) {
  return tile.heads * tile.rows * PartialRowFloats(tile.attention->problem.dim_v);
}
inline constexpr int64_t kPartialFloatsMax = kDecodeRows * (3 + kHeadDimMax);

// Functions for one instruction set. They take tiles made by DecodeTile, with any `work` and
// `stop`.
struct DecodeFunctions {
  // Computes split n into `partial`.
  void (*split)(const Tile& tile, int64_t n, float* partial, Scratch* scratch);
  // Merges the splits' partials in order and stores O and LSE. Rows that are not finite (NaN, Inf,
  // sums that overflow) are computed again by `careful`.
  void (*finish)(const Tile& tile, const float* partials, TileFunction careful, Scratch* scratch);
  // Computes and merges all splits, with no memory beside the scratch.
  void (*whole)(const Tile& tile, TileFunction careful, Scratch* scratch);
};

// The same instruction set as ChooseTileFunction, which has been called.
DecodeFunctions ChooseDecodeFunctions();

}  // namespace attend::cpu_flash
