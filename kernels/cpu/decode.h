// SPDX-License-Identifier: Apache-2.0
//
// The decoding path of cpu_flash: few query rows against many keys. K and V are read once, straight
// from where they lie, and the keys of one KV head are cut into splits that threads take. Whether a
// sequence goes this way (decode_rule.h), and where it is cut, depends on its problem alone, and so
// do its bits.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/decode_rule.h"
#include "kernels/contract/problem.h"
#include "kernels/cpu/flash_tile.h"

namespace attend::cpu_flash {

// Keys of a split at least: enough for its partial to be small beside them (a few per cent of their
// bytes for ordinary head dimensions). A split is whole key tiles.
inline constexpr int64_t kSplitKeysMin = 512;
static_assert(kSplitKeysMin % kKeyTile == 0);

// Splits of one KV head at most: it bounds the memory of partials, whatever the length.
inline constexpr int64_t kSplitsMax = 65;

// The tile that is all true rows of the query heads of one KV head.
inline Tile DecodeTile(const Attention& a, const Sequence& s, int64_t b, int64_t h_kv) {
  const int64_t group = a.problem.group();
  return {&a, b, h_kv * group, group, 0, s.q_len, 0.0, nullptr, true};
}

// Split n of `count` is keys [(first + n) * keys, (first + n + 1) * keys) as far as they are seen.
// There is always one, be it without a key.
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

// A partial, the answer over one split, is for each of the tile's rows its maximum, its sum and its
// O, which is not divided yet, in the order of the instruction set.
inline int64_t PartialRowFloats(int64_t dim_v) { return 2 + (dim_v + 31) / 32 * 32; }
inline int64_t PartialFloats(const Tile& tile) {
  return tile.heads * tile.rows * PartialRowFloats(tile.attention->problem.dim_v);
}
inline constexpr int64_t kPartialFloatsMax = kDecodeRows * (2 + kHeadDimMax);

// The versions for one instruction set. Of tiles that DecodeTile made, with `work` and `stop` as
// the caller likes.
struct DecodeFunctions {
  // Computes split n to `partial`.
  void (*split)(const Tile& tile, int64_t n, float* partial, Scratch* scratch);
  // Merges the splits' partials, in order, and stores O and LSE. Rows that need care (NaN, Inf,
  // sums that overflow) are computed again by `careful`.
  void (*finish)(const Tile& tile, const float* partials, TileFunction careful, Scratch* scratch);
  // Both, for all splits, without memory beside the scratch.
  void (*whole)(const Tile& tile, TileFunction careful, Scratch* scratch);
};

// For the best instruction set of this machine; asked once per batch.
DecodeFunctions ChooseDecodeFunctions();

}  // namespace attend::cpu_flash
