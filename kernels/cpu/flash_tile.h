// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler of cpu_flash (flash.cc) and its SIMD code (flash_tile.cc, compiled
// once per instruction set) agree on: a tile of query rows, and the scratch memory to compute it
// in.

#pragma once

#include <cmath>
#include <cstdint>
#include <memory>

#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend::cpu_flash {

// Most query rows of a tile. They are spread across SIMD lanes, so keys and values are broadcast
// and need no transposing, and the softmax of all rows runs lane by lane without a horizontal sum.
inline constexpr int64_t kRowTile = 192;

// Keys between two rescalings of the output. Tiles begin at multiples of it, whatever the mask, so
// that a row's roundings do not depend on the rows it is computed with.
inline constexpr int64_t kKeyTile = 64;

// Whether scores are left as q.k until their exponential, and what they are multiplied by then.
inline bool ScaledLate(const Problem& p) {
  return p.softcap == 0 && !p.has_bias && !p.has_alibi && p.scale >= kLateScaleMin &&
         p.scale <= kLateScaleMax;
}
inline float UnitOf(const Problem& p) { return ScaledLate(p) ? p.scale : 1.0f; }

// The largest scale of scores that bf16 pairs may make (FitsPairs in flash_math-inl.h).
inline constexpr float kPairScaleMax = 0x1p20f;

// Whether this machine adds pairs of bf16 products. False after UseBf16PairsForTest(false).
bool HasBf16Pairs();
void UseBf16PairsForTest(bool use);
inline bool TakesPairs(const Problem& p) {
  return p.dtype == DType::kBFloat16 && std::abs(p.scale) <= kPairScaleMax && HasBf16Pairs();
}

// Query rows [row, row + rows) of `heads` neighbouring query heads that share a KV head: all rows
// of several heads if they are short (heads * rows <= kRowTile), else rows of one head. With
// dropout of several only if each has whole tiles of 16 rows of the whole.
struct Tile {
  const Attention* attention;
  int64_t b;
  int64_t head;
  int64_t heads;
  int64_t row;
  int64_t rows;
  double work;           // relative cost, to start long tiles first
  const StopFlag* stop;  // looked at with every tile of keys; null: none
  bool decodes = false;  // all true rows of a KV head, for decode.h
};

// Lanes of the widest panel that any instruction set uses.
inline constexpr int64_t kPanelLanesMax = 48;

// Columns of V that are kept together, key after key; whole blocks of O's columns are computed.
inline constexpr int64_t kValueBlock = 8;
inline constexpr int64_t kValueGap = 16;

// Words of dropout's bits for a pair of keys: a panel's rows, which may begin within a tile of 16.
inline constexpr int64_t kDrawStride = kPanelLanesMax + kDropoutTile;

// Memory of one thread while it computes a tile. The tile's rows are divided into panels of a few
// SIMD vectors; a panel of a matrix is [the matrix's own index][lanes of the panel]. Aligned for
// any vector. Uninitialised on purpose: every part is written before it is read.
struct alignas(128) Scratch {
  float q[kHeadDimMax * kRowTile];            // panels of [dim][lane]
  float q_pairs[kHeadDimMax / 2 * kRowTile];  // the same in bf16: panels of [pair of dims][lane]
  float o[kHeadDimMax * kRowTile];            // panels of [dim][lane], not yet divided by the sum
  // As o, where it was not finite at first: what weights are multiplied by on their way to it.
  float down[kHeadDimMax * kRowTile];
  float s[kKeyTile * kPanelLanesMax];     // one panel, [key][lane]: scores, then weights
  float bias[kKeyTile * kPanelLanesMax];  // one panel, [key][lane]
  float k[kKeyTile * kHeadDimMax];        // [key][dim]
  // Blocks of [key][kValueBlock], a gap after each.
  float v[(kKeyTile * kValueBlock + kValueGap) * (kHeadDimMax / kValueBlock)];
  uint32_t draws[kDropoutTile / 2 * kDrawStride];  // dropout's, of 16 keys
  float rows[4 * kHeadDimMax];                     // a few rows of Q or O on their way in or out
  // Per lane: softmax state, its rescaling in this key tile, visible keys relative to the key tile,
  // ALiBi's slope, and the key on the diagonal relative to the key tile.
  float max[kRowTile];
  float sum[kRowTile];
  float weight[kRowTile];
  float begin[kRowTile];
  float end[kRowTile];
  float slope[kRowTile];
  float unpaired[kRowTile];  // not 0: its scores must not be sums of pairs
  float diagonal[kRowTile];
};

// Computes a tile and stores its rows of O and LSE.
using TileFunction = void (*)(const Tile& tile, Scratch* scratch);

// The version for the best instruction set of this machine; asked once per batch.
TileFunction ChooseTileFunction();

}  // namespace attend::cpu_flash
