// SPDX-License-Identifier: Apache-2.0
//
// What a GPU's backward pass keeps of each query row before it walks the keys, what it adds dQ up
// in where blocks of keys take turns at it, and how much memory that takes: the only memory it
// needs beside its tensors.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

// A sequence's terms begin at multiples of this, as the copy engine needs (16 bytes).
inline constexpr int kTermAlignment = 4;
// Terms that a tile of a sequence's last rows may read beyond them. They need not be any row's.
inline constexpr int kTermSlack = 128;
inline constexpr int64_t kTermFlagBytes = 256;  // before the terms
inline constexpr int64_t kHeadPartBytes = 16;   // of each head of a sequence, behind them

// Terms of one head. Packed sequences may begin anywhere: each has up to an alignment more.
ATTEND_HD inline int64_t TermsOfHead(const Problem& p) {
  return p.packed ? (p.total_q / kTermAlignment + p.batch) * kTermAlignment
                  : (p.len_q + kTermAlignment - 1) / kTermAlignment * kTermAlignment * p.batch;
}
ATTEND_HD inline int64_t TermIndex(const Problem& p, const Sequence& s, int64_t b, int64_t h,
                                   int64_t i) {
  const int64_t first = p.packed
                            ? (s.q_row / kTermAlignment + b) * kTermAlignment
                            : (p.len_q + kTermAlignment - 1) / kTermAlignment * kTermAlignment * b;
  return h * TermsOfHead(p) + first + i;
}

// Four floats for each of all heads' terms, with slack after each, the flags, and what is kept of
// each head.
inline Result<int64_t> GradientTermsBytes(const Problem& p) {
  const Result<int64_t> terms = CheckedProduct("terms of query rows", TermsOfHead(p), p.heads_q);
  if (!terms.ok()) return terms;
  const Result<int64_t> bytes =
      CheckedProduct("bytes of terms", *terms + kTermSlack, 4 * sizeof(float));
  if (!bytes.ok()) return bytes;
  const Result<int64_t> heads = CheckedProduct("heads", p.batch, p.heads_q, kHeadPartBytes);
  if (!heads.ok()) return heads;
  if (*bytes > INT64_MAX - *heads - kTermFlagBytes) {
    return InvalidArgument("terms of query rows take more bytes than 64 bits count");
  }
  return *bytes + *heads + kTermFlagBytes;
}

// ---- dQ in turns --------------------------------------------------------------------------------

// A tile of query rows has sums of dQ in fp32, which blocks of keys add to in the keys' order, and
// two counters of those that have. Either half of a tile is 64 rows of 64 columns.
inline constexpr int64_t kTurnHalfFloats = 64 * 64;
inline constexpr int64_t kTurnTileBytes = 2 * kTurnHalfFloats * static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kTurnAlignment = 256;
inline constexpr int64_t kTurnDimMax = 128;
// More is not worth its memory: the two kernels that need none are slower by a quarter.
inline constexpr int64_t kTurnBytesMax = int64_t{4} << 30;

ATTEND_HD inline int64_t TurnRows(const Problem& p) {
  return p.dim <= 64 && p.dim_v <= 64 ? 128 : 64;
}
// Tiles of one head. Packed sequences may begin anywhere: each has one more.
ATTEND_HD inline int64_t TurnTilesOfHead(const Problem& p) {
  const int64_t rows = TurnRows(p);
  return p.packed ? p.total_q / rows + p.batch : (p.len_q + rows - 1) / rows * p.batch;
}
// The tile of row i, which begins a tile.
ATTEND_HD inline int64_t TurnTile(const Problem& p, const Sequence& s, int64_t b, int64_t h,
                                  int64_t i) {
  const int64_t rows = TurnRows(p);
  const int64_t first = p.packed ? s.q_row / rows + b : (p.len_q + rows - 1) / rows * b;
  return h * TurnTilesOfHead(p) + first + i / rows;
}

// Of counters, and of counters and sums; after the terms, all on boundaries of kTurnAlignment.
ATTEND_HD inline int64_t TurnCounterBytes(int64_t tiles) {
  return (tiles * 2 * 4 + kTurnAlignment - 1) / kTurnAlignment * kTurnAlignment;
}
inline Result<int64_t> TurnBytes(const Problem& p) {
  const Result<int64_t> tiles = CheckedProduct("tiles of dQ", TurnTilesOfHead(p), p.heads_q);
  if (!tiles.ok()) return tiles;
  const Result<int64_t> sums = CheckedProduct("bytes of dQ's sums", *tiles, kTurnTileBytes);
  if (!sums.ok()) return sums;
  return kTurnAlignment + TurnCounterBytes(*tiles) + *sums;
}

// Whether blocks of keys take turns at dQ, if the device has room, and dQ is wanted and so is
// dK or dV. Bits depend on each of these.
inline bool TakesTurns(const Problem& p) {
  if (std::max(p.dim, p.dim_v) > kTurnDimMax || p.softcap > 0.0f || p.dropout > 0) return false;
  const Result<int64_t> bytes = TurnBytes(p);
  return bytes.ok() && *bytes <= kTurnBytesMax;
}

inline Result<int64_t> TurnWorkspaceBytes(const Problem& p) {
  const Result<int64_t> terms = GradientTermsBytes(p);
  if (!terms.ok()) return terms;
  const Result<int64_t> turns = TurnBytes(p);
  if (!turns.ok()) return turns;
  return *terms + *turns;
}

}  // namespace attend
