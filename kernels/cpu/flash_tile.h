// SPDX-License-Identifier: Apache-2.0
//
// The interface between cpu_flash's scheduler (flash.cc) and its SIMD code (flash_tile.cc, compiled
// once per instruction set): a tile of query rows, and the scratch memory to compute it in.

#pragma once

#include <cmath>
#include <cstdint>
#include <memory>

#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend::cpu_flash {

// Most query rows of a tile. Rows lie across SIMD lanes, so K and V are broadcast without being
// transposed, and the softmax of all rows runs lane by lane without horizontal sums.
inline constexpr int64_t kRowTile = 192;

// Keys between two rescalings of the output. Key tiles begin at multiples of it under any mask, so
// that a row's rounding does not depend on the rows it is computed with.
inline constexpr int64_t kKeyTile = 64;

// Whether scores stay q.k until the exponential, whose factor (UnitOf) then includes the scale.
inline bool ScaledLate(const Problem& p) {
  return p.softcap == 0 && !p.has_bias && !p.has_alibi && p.scale >= kLateScaleMin &&
         p.scale <= kLateScaleMax;
}
inline float UnitOf(const Problem& p) { return ScaledLate(p) ? p.scale : 1.0f; }

// The largest scale at which scores may be sums of bf16 pairs (FitsPairs in flash_math-inl.h).
inline constexpr float kPairScaleMax = 0x1p20f;

// Whether this machine can add pairs of bf16 products. False after UseBf16PairsForTest(false).
bool HasBf16Pairs();
void UseBf16PairsForTest(bool use);
inline bool TakesPairs(const Problem& p) {
  return p.dtype == DType::kBFloat16 && std::abs(p.scale) <= kPairScaleMax && HasBf16Pairs();
}

// Query rows [row, row + rows) of `heads` neighbouring query heads that share a KV head: all rows
// of several short heads (heads * rows <= kRowTile), or rows of one head. With dropout, a tile has
// several heads only if each is whole 16-row tiles of the whole.
struct Tile {
  const Attention* attention;
  int64_t b;
  int64_t head;
  int64_t heads;
  int64_t row;
  int64_t rows;
  double work;           // relative cost; long tiles start first
  const StopFlag* stop;  // checked before every key tile; may be null
  bool decodes = false;  // all true rows of a KV head, for decode.h
};

// Lanes of the widest panel of any instruction set.
inline constexpr int64_t kPanelLanesMax = 48;

// Columns of V that are stored together, key after key. O is computed in whole blocks of columns.
inline constexpr int64_t kValueBlock = 8;
inline constexpr int64_t kValueGap = 16;

// Words of dropout's draws for one pair of keys: a panel's rows, which may begin within a tile of
// 16.
inline constexpr int64_t kDrawStride = kPanelLanesMax + kDropoutTile;

// One thread's memory for a tile. The tile's rows are divided into panels of a few SIMD vectors; a
// panel of a matrix is [matrix index][lane]. Aligned for any vector. Left uninitialised, because
// every part is written before it is read.
struct alignas(128) Scratch {
  float q[kHeadDimMax * kRowTile];            // panels of [dim][lane]
  float q_pairs[kHeadDimMax / 2 * kRowTile];  // in bf16: panels of [pair of dims][lane]
  float o[kHeadDimMax * kRowTile];            // panels of [dim][lane], not yet divided by sum
  // As o: factors for the weights of elements that were not finite at first (ScaleDown).
  float down[kHeadDimMax * kRowTile];
  float s[kKeyTile * kPanelLanesMax];     // one panel, [key][lane]: scores, then weights
  float bias[kKeyTile * kPanelLanesMax];  // one panel, [key][lane]
  float k[kKeyTile * kHeadDimMax];        // [key][dim]
  // Blocks of [key][kValueBlock], each followed by a gap.
  float v[(kKeyTile * kValueBlock + kValueGap) * (kHeadDimMax / kValueBlock)];
  uint32_t draws[kDropoutTile / 2 * kDrawStride];  // dropout's draws for 16 keys
  float rows[4 * kHeadDimMax];                     // a few rows of Q or O during conversion
  // Per lane: softmax state, its rescaling in this key tile, visible keys relative to the key tile,
  // ALiBi's slope, and the diagonal's key relative to the key tile.
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

// Selects the best instruction set of this machine. Called once per batch.
TileFunction ChooseTileFunction();

}  // namespace attend::cpu_flash
