// SPDX-License-Identifier: Apache-2.0
//
// The interface between cpu_flash's scheduler (flash.cc) and its SIMD code (flash_tile.cc, compiled
// once per instruction set): a tile of query rows, and the scratch memory to compute it in.

#pragma once

#include <algorithm>
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

// The same for cpu_flash_amx, whose output is in memory between two of them; and the keys, or
// columns of V, that are rounded up to.
inline constexpr int64_t kAmxKeys = 256;
inline constexpr int64_t kAmxBlock = 32;
// Floats, each a pair of keys in bf16, from one column of V to the next. The gap keeps columns out
// of each other's cache sets.
inline constexpr int64_t kAmxValueStride = kAmxKeys / 2 + 16;
inline constexpr int64_t kAmxPanelLanes = 32;

// Most rows of its tiles: of any problem, and of those with these D and Dv, whose Q and O then take
// as much memory as kRowTile rows of the largest.
inline constexpr int64_t kAmxRowTile = 768;
constexpr int64_t WholeBlocks(int64_t n) { return (n + kAmxBlock - 1) / kAmxBlock * kAmxBlock; }
inline int64_t AmxRowTile(const Problem& p) {
  const int64_t rows = kRowTile * kHeadDimMax / WholeBlocks(std::max(p.dim, p.dim_v));
  return std::min(kAmxRowTile, rows / kAmxPanelLanes * kAmxPanelLanes);
}

// Whether scores stay q.k until the exponential, whose factor (UnitOf) then includes the scale.
inline bool ScaledLate(const Problem& p) {
  return !HasScoreTerms(p) && p.scale >= kLateScaleMin && p.scale <= kLateScaleMax;
}
inline float UnitOf(const Problem& p) { return ScaledLate(p) ? p.scale : 1.0f; }

// Whether this machine can add pairs of bf16 products (FitsPairs in flash_math-inl.h). False after
// UseBf16PairsForTest(false).
bool HasBf16Pairs();
void UseBf16PairsForTest(bool use);
inline bool TakesPairs(const Problem& p) {
  return p.dtype == DType::kBFloat16 && std::abs(p.scale) <= kFlushedScaleMax && HasBf16Pairs();
}

// Query rows [row, row + rows) of `heads` neighbouring query heads that share a KV head: all rows
// of several short heads (heads * rows <= kRowTile, or AmxRowTile), or rows of one head. With
// dropout, a tile has several heads only if each is whole 16-row tiles of the whole.
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
  bool amx = false;      // for flash_amx-inl.h, or decode_amx-inl.h
};

// Lanes of the widest panel of any instruction set.
inline constexpr int64_t kPanelLanesMax = 48;
static_assert(kKeyTile * kPanelLanesMax <= kAmxKeys * kAmxPanelLanes);

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
  union {
    float q[kHeadDimMax * kRowTile];             // panels of [dim][lane]
    float amx_v[kHeadDimMax * kAmxValueStride];  // [dim][pair of keys] in bf16
  };
  float q_pairs[kHeadDimMax / 2 * kRowTile];  // in bf16: panels of [pair of dims][lane]
  float o[kHeadDimMax * kRowTile];            // panels of [dim][lane], not yet divided by sum
  union {
    // As o: factors for the weights of elements that were not finite at first (ScaleDown).
    float down[kHeadDimMax * kRowTile];
    uint16_t amx_k[kAmxKeys * kHeadDimMax];  // [key][dim] in bf16
  };
  float s[kAmxKeys * kAmxPanelLanes];     // one panel, [key][lane]: scores, then weights
  float bias[kAmxKeys * kAmxPanelLanes];  // one panel, [key][lane]
  float k[kKeyTile * kHeadDimMax];        // [key][dim]
  // Blocks of [key][kValueBlock], each followed by a gap.
  float v[(kKeyTile * kValueBlock + kValueGap) * (kHeadDimMax / kValueBlock)];
  uint32_t draws[kDropoutTile / 2 * kDrawStride];  // dropout's draws for 16 keys
  float rows[4 * kHeadDimMax];                     // a few rows of Q or O during conversion
  // Per lane: softmax state, its rescaling in this key tile, visible keys relative to the key tile,
  // ALiBi's slope, and the diagonal's key relative to the key tile.
  float max[kAmxRowTile];
  float sum[kAmxRowTile];
  float weight[kAmxRowTile];
  float begin[kAmxRowTile];
  float end[kAmxRowTile];
  float slope[kAmxRowTile];
  float unpaired[kAmxRowTile];  // not 0: its scores must not be sums of pairs, nor of tiles
  float diagonal[kAmxRowTile];
};

// Computes a tile and stores its rows of O and LSE.
using TileFunction = void (*)(const Tile& tile, Scratch* scratch);

// Selects the best instruction set of this machine. Called once per batch.
TileFunction ChooseTileFunction();
// The same for tiles whose `amx` is set. Null without AVX-512.
TileFunction ChooseAmxTileFunction();

}  // namespace attend::cpu_flash
