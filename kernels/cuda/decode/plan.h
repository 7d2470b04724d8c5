// SPDX-License-Identifier: Apache-2.0
//
// How a decoding launch (decode.h) cuts its keys and shares them out. Host and device code: the
// blocks of a launch and the tests work it out alike.
//
// A *unit* is one KV head of one sequence with up to a tile's rows: all query heads of the group,
// row after row. Its keys are cut into *chunks* at places that the sequence alone decides, so that
// no neighbour changes a bit. Chunks of all units stand in one row, each with a cost; a *piece* of
// that row is what one block computes at a time. Up to kFanIn chunks make a *group*, whose partial
// answers are merged in order, and then those of a unit's groups.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

inline constexpr int kFanIn = 16;                   // partial answers that one merge takes
inline constexpr int kChunksMax = kFanIn * kFanIn;  // of a unit
inline constexpr int kCostKeys = 64;                // keys that cost one
inline constexpr int kChunkCost = 1;                // of closing a chunk, beside its keys

// Short sequences have short chunks: they alone must fill a device. A partial answer of many rows
// is worth more keys.
inline constexpr int kShortKeys = 2048;
inline constexpr int kMediumKeys = 8192;
inline constexpr int kShortChunk = 7;  // powers of two
inline constexpr int kMediumChunk = 8;
inline constexpr int kLongChunk = 9;

// Of numbers that are not negative. Most fit 32 bits, whose division takes a device a tenth of the
// time, and one thread works these out while others wait.
ATTEND_HD inline int64_t FastDivide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
ATTEND_HD inline int64_t CeilDivide(int64_t a, int64_t b) { return FastDivide(a + b - 1, b); }
ATTEND_HD inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// The chunks of a sequence of k_len keys, for units of `rows`, have 2^ChunkShift keys each: a
// multiple of kCostKeys.
ATTEND_HD inline int ChunkShift(int64_t k_len, int64_t rows) {
  int shift = k_len <= kShortKeys ? kShortChunk : k_len <= kMediumKeys ? kMediumChunk : kLongChunk;
  shift += rows > 32 ? 2 : rows > 16 ? 1 : 0;
  while ((int64_t{kChunksMax} << shift) < k_len) ++shift;
  return shift;
}
ATTEND_HD inline int64_t ChunkKeys(int64_t k_len, int64_t rows) {
  return int64_t{1} << ChunkShift(k_len, rows);
}

// The most chunks of any sequence of up to k_len keys.
inline int64_t ChunksAtMost(int64_t k_len, int64_t rows) {
  int64_t most = 1;
  for (const int64_t keys : {int64_t{kShortKeys}, int64_t{kMediumKeys}, k_len}) {
    const int64_t least = Least(keys, k_len);
    most = std::max(most, CeilDivide(least, ChunkKeys(least, rows)));
  }
  return CeilDivide(k_len, ChunkKeys(k_len, rows)) * 2 > kChunksMax ? kChunksMax : most;
}

// How a sequence is cut. All of its units are cut alike.
struct SequencePlan {
  Sequence sequence;
  int32_t row_tiles = 0;
  int32_t units = 0;      // KV heads x row_tiles
  int32_t key_begin = 0;  // keys that some row sees
  int32_t key_end = 0;
  int32_t chunk_shift = 0;
  int32_t first_chunk = 0;  // of the sequence's chunks, the first that has such keys
  int32_t chunks = 1;       // from there on; one without keys if there are none
  int32_t chunk_cost = 0;

  ATTEND_HD int64_t unit_cost() const { return int64_t{chunks} * chunk_cost; }
  ATTEND_HD int64_t cost() const { return units * unit_cost(); }
};

// `tile_rows`: a power of two.
ATTEND_HD inline SequencePlan PlanSequence(const Attention& a, int64_t b, int tile_rows) {
  const Problem& p = a.problem;
  SequencePlan plan;
  const Sequence s = SequenceOf(a, b);
  plan.sequence = s;
  const auto heads_kv = static_cast<uint32_t>(p.heads_kv);
  const int64_t rows = s.q_rows * (static_cast<uint32_t>(p.heads_q) / heads_kv);
  plan.row_tiles = static_cast<int32_t>(CeilDivide(rows, tile_rows));
  plan.units = static_cast<int32_t>(heads_kv) * plan.row_tiles;
  if (s.q_len > 0) {
    // Both ends of the visible range never fall as the row grows.
    const int64_t begin = VisibleKeys(p.mask, s, 0).begin;
    const int64_t end = VisibleKeys(p.mask, s, s.q_len - 1).end;
    if (begin < end) {
      plan.key_begin = static_cast<int32_t>(begin);
      plan.key_end = static_cast<int32_t>(end);
    }
  }
  plan.chunk_shift = ChunkShift(s.k_len, Least(rows, tile_rows));
  plan.first_chunk = plan.key_begin >> plan.chunk_shift;
  const int64_t keys = int64_t{1} << plan.chunk_shift;
  const int64_t chunks = ((plan.key_end + keys - 1) >> plan.chunk_shift) - plan.first_chunk;
  plan.chunks = chunks > 1 ? static_cast<int32_t>(chunks) : 1;
  plan.chunk_cost = static_cast<int32_t>(keys / kCostKeys) + kChunkCost;
  return plan;
}

// The row of chunks, cut into pieces: a chunk belongs to the piece in which it begins. Every block
// has one of the first pieces, which are large, as blocks do not all read equally fast; the smaller
// ones behind them go to whoever comes first. Where there is little to share, blocks share it once.
inline constexpr int kPhases = 3;
ATTEND_HD constexpr int PhaseShare(int phase) {  // of 64
  return phase == 0 ? 45 : phase == 1 ? 13 : 6;
}
inline constexpr int kOncePerBlock = 64;  // cost of a block up to which

struct Pieces {
  int64_t total = 0;  // cost of all chunks
  int64_t begin[kPhases] = {};
  int64_t each[kPhases] = {};  // cost of a phase's pieces but the last
  int32_t blocks = 1;
  int32_t count = 1;

  ATTEND_HD int64_t PhaseEnd(int phase) const {
    return phase + 1 < kPhases ? begin[phase + 1] : total;
  }
  ATTEND_HD int64_t Begin(int piece) const {
    int phase = 0;
    for (; phase + 1 < kPhases && piece >= blocks; ++phase) piece -= blocks;
    return Least(begin[phase] + piece * each[phase], PhaseEnd(phase));
  }
  ATTEND_HD int64_t End(int piece) const { return piece + 1 < count ? Begin(piece + 1) : total; }
  // `position` is below `total`.
  ATTEND_HD int Of(int64_t position) const {
    int phase = kPhases - 1;
    while (phase > 0 && position < begin[phase]) --phase;
    return phase * blocks + static_cast<int>(FastDivide(position - begin[phase], each[phase]));
  }
};

ATTEND_HD inline Pieces CutPieces(int64_t total, int blocks) {
  Pieces pieces;
  pieces.total = total;
  pieces.blocks = blocks;
  const bool once = total <= int64_t{kOncePerBlock} * blocks;
  pieces.count = once ? blocks : kPhases * blocks;
  int64_t begin = 0;
  for (int phase = 0; phase < kPhases; ++phase) {
    const int64_t cost = once ? (phase == 0 ? total : 0) : total * PhaseShare(phase) / 64;
    pieces.begin[phase] = begin;
    pieces.each[phase] = CeilDivide(phase + 1 < kPhases ? cost : total - begin, blocks);
    if (pieces.each[phase] == 0) pieces.each[phase] = 1;
    begin += cost;
  }
  return pieces;
}

// Groups of a unit's chunks.
ATTEND_HD inline int GroupCount(int chunks) { return (chunks + kFanIn - 1) / kFanIn; }
ATTEND_HD inline int GroupSize(int chunks, int group) {
  return static_cast<int>(Least(kFanIn, chunks - group * kFanIn));
}

}  // namespace attend::cuda
