// SPDX-License-Identifier: Apache-2.0
//
// Workspace of a GPU's backward pass: the terms it computes per query row before it walks the keys
// and, where key blocks take turns, fp32 sums of dQ. It needs no other memory beside its tensors.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

// A sequence's terms begin at multiples of this: TMA needs 16-byte alignment.
inline constexpr int kTermAlignment = 4;
// A tile that holds a sequence's last rows may read this many terms beyond them; their values do
// not matter.
inline constexpr int kTermSlack = 128;
inline constexpr int64_t kTermFlagBytes = 256;  // before the terms
inline constexpr int64_t kHeadPartBytes = 16;   // per head of a sequence, behind the terms

// Terms of one head. Packed sequences may begin at any row, so each is padded by up to one
// alignment.
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

// Tiles of one head over all sequences, of `rows` rows each. Packed sequences, of `total` rows
// together, may begin at any row, so each has one more.
ATTEND_HD inline int64_t TilesOfHead(const Problem& p, int64_t total, int64_t length,
                                     int64_t rows) {
  return p.packed ? total / rows + p.batch : (length + rows - 1) / rows * p.batch;
}
// Index among them of the tile that starts at row i of sequence b, which begins at row `first` of a
// packed tensor.
ATTEND_HD inline int64_t TileOfHead(const Problem& p, int64_t first, int64_t length, int64_t rows,
                                    int64_t b, int64_t i) {
  return (p.packed ? first / rows + b : (length + rows - 1) / rows * b) + i / rows;
}

// ---- tiles computed again -----------------------------------------------------------------------

// Between the flags and the terms: a word for each query head, and for each tile of dK, dV and dQ
// two words, for lists of those that hold NaN or Inf. GPUs with less shared memory than Hopper's
// have up to kRedoParts tiles for one of these.
inline constexpr int kRedoParts = 4;
ATTEND_HD inline int64_t RedoRows(const Problem& p) {  // of dQ; dK and dV have tiles of 64
  return p.dim <= 128 && p.dim_v <= 128 ? 64 : 32;
}
ATTEND_HD inline int64_t RedoTiles(const Problem& p) {
  return 2 * TilesOfHead(p, p.total_k, p.len_k, 64) * p.heads_kv +
         TilesOfHead(p, p.total_q, p.len_q, RedoRows(p)) * p.heads_q;
}
ATTEND_HD inline int64_t RedoBytes(const Problem& p) {
  return (p.batch * p.heads_q + 2 * kRedoParts * RedoTiles(p) + 3) / 4 * 16;
}

// Four floats per term of every head, with slack, the flags, the lists, and the per-head part.
inline Result<int64_t> GradientTermsBytes(const Problem& p) {
  const Result<int64_t> terms = CheckedProduct("terms of query rows", TermsOfHead(p), p.heads_q);
  if (!terms.ok()) return terms;
  const Result<int64_t> bytes =
      CheckedProduct("bytes of terms", *terms + kTermSlack, 4 * sizeof(float));
  if (!bytes.ok()) return bytes;
  const Result<int64_t> heads = CheckedProduct("heads", p.batch, p.heads_q, kHeadPartBytes);
  if (!heads.ok()) return heads;
  const Result<int64_t> keys = CheckedProduct("rows of K and V", p.batch, p.heads_kv,
                                              std::max(p.len_k, p.total_k), kRedoParts);
  if (!keys.ok()) return keys;
  if (*bytes > INT64_MAX - *heads - kTermFlagBytes - RedoBytes(p)) {
    return InvalidArgument("terms of query rows take more bytes than 64 bits count");
  }
  return *bytes + *heads + kTermFlagBytes + RedoBytes(p);
}

// ---- dQ in turns --------------------------------------------------------------------------------

// Every tile of query rows has fp32 sums of dQ, to which key blocks add in key order, and two
// counters of blocks that have added, one per half. A half is 64 x 64.
inline constexpr int64_t kTurnHalfFloats = 64 * 64;
inline constexpr int64_t kTurnTileBytes = 2 * kTurnHalfFloats * static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kTurnAlignment = 256;
inline constexpr int64_t kTurnDimMax = 128;
// More memory does not pay: the two kernels that need none are only a quarter slower.
inline constexpr int64_t kTurnBytesMax = int64_t{4} << 30;

ATTEND_HD inline int64_t TurnRows(const Problem& p) {
  return p.dim <= 64 && p.dim_v <= 64 ? 128 : 64;
}
ATTEND_HD inline int64_t TurnTilesOfHead(const Problem& p) {
  return TilesOfHead(p, p.total_q, p.len_q, TurnRows(p));
}
// Index of the tile that starts at row i.
ATTEND_HD inline int64_t TurnTile(const Problem& p, const Sequence& s, int64_t b, int64_t h,
                                  int64_t i) {
  return h * TurnTilesOfHead(p) + TileOfHead(p, s.q_row, p.len_q, TurnRows(p), b, i);
}

// Bytes of the counters, and of counters and sums. They follow the terms, at multiples of
// kTurnAlignment.
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

// Whether key blocks take turns at dQ, provided that the device has room and that dQ and one of dK
// and dV are wanted. All of these affect the result's bits.
inline bool TakesTurns(const Problem& p) {
  if (std::max(p.dim, p.dim_v) > kTurnDimMax || CapOf(p).on() || p.dropout > 0) return false;
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
