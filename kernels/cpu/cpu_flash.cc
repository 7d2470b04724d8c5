// SPDX-License-Identifier: Apache-2.0
//
// The scheduler of cpu_flash: cuts a batch into tiles and has the arena's threads take them,
// longest first.

#include "kernels/cpu/cpu_flash.h"

#include <tbb/task_arena.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/check_rows.h"
#include "kernels/cpu/cpu_flash_tile.h"
#include "kernels/cpu/parallel.h"

namespace attend {
namespace {

using cpu_flash::kRowTile;
using cpu_flash::Scratch;
using cpu_flash::Tile;

// Below this, waking another thread costs more than it can save (some 40 us of one core's work).
constexpr double kInlineWork = 3e6;

// What a tile costs beside its multiply-adds, in multiply-adds.
constexpr double kTileOverhead = 20000;

// Of the calling thread, made when first needed and kept.
Scratch* ThreadScratch() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (scratch == nullptr) scratch.reset(new Scratch);  // not make_unique: no need to zero it
  return scratch.get();
}

// Multiply-adds (over whole vectors) of rows [row, row + rows) of `heads` heads.
double WorkOf(const Attention& a, const Sequence& s, int64_t heads, int64_t row, int64_t rows) {
  const Problem& p = a.problem;
  const int64_t last = std::min(row + rows, s.q_len) - 1;
  if (last < row) return kTileOverhead;
  const KeyRange first_keys = VisibleKeys(p.mask, s, row);
  const KeyRange last_keys = VisibleKeys(p.mask, s, last);
  const int64_t keys = std::max<int64_t>(0, last_keys.end - first_keys.begin);
  const int64_t lanes = (heads * rows + 15) / 16 * 16;
  return kTileOverhead + static_cast<double>(keys * (p.dim + p.dim_v)) * static_cast<double>(lanes);
}

// Most rows to a tile: many, as they share the packing of K and V, yet few enough for every thread
// to get several tiles. No row's bits depend on it.
int64_t MostRows(std::span<const Attention* const> batch, int threads) {
  constexpr double kTilesPerThread = 4;
  double rows = 0;
  for (const Attention* attention : batch) rows += static_cast<double>(CountRows(*attention));
  int64_t most = kRowTile;
  while (most > kRowTile / 4 && rows < kTilesPerThread * threads * static_cast<double>(most)) {
    most /= 2;
  }
  return most;
}

// Rows of each tile of a head: as even as whole vectors allow.
int64_t TileRows(int64_t rows, int64_t most) {
  constexpr int64_t kVector = 16;
  const int64_t tiles = (rows + most - 1) / most;
  return ((rows + tiles - 1) / tiles + kVector - 1) / kVector * kVector;
}

// Calls visit(tile) for every tile of an attention, in a fixed order.
template <class Visit>
void ForEachTile(const Attention& a, int64_t most_rows, const Visit& visit) {
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    if (s.q_rows == 0) continue;
    // Short sequences share a tile with other heads of the same KV head.
    const int64_t together = std::clamp<int64_t>(most_rows / s.q_rows, 1, p.group());
    const int64_t tile_rows = TileRows(s.q_rows, most_rows);
    for (int64_t h_kv = 0; h_kv < p.heads_kv; ++h_kv) {
      for (int64_t g = 0; g < p.group(); g += together) {
        const int64_t heads = std::min(together, p.group() - g);
        const int64_t head = h_kv * p.group() + g;
        for (int64_t row = 0; row < s.q_rows; row += tile_rows) {
          const int64_t rows = std::min(tile_rows, s.q_rows - row);
          visit(Tile{&a, b, head, heads, row, rows, WorkOf(a, s, heads, row, rows)});
        }
      }
    }
  }
}

void RunInline(std::span<const Attention* const> batch, cpu_flash::TileFunction run) {
  Scratch* scratch = ThreadScratch();
  for (const Attention* attention : batch) {
    ForEachTile(*attention, kRowTile, [&](const Tile& tile) { run(tile, scratch); });
  }
}

}  // namespace

bool CpuFlashRunsInline(std::span<const Attention* const> batch) {
  double work = 0;
  for (const Attention* attention : batch) {
    const Problem& p = attention->problem;
    // An upper bound in constant time; sequences that the mask thins out run as well inline.
    const double rows = static_cast<double>(p.packed ? p.total_q : p.batch * p.len_q);
    work += rows * static_cast<double>(p.heads_q) *
            static_cast<double>((p.len_k + 16) * (p.dim + p.dim_v));
    if (work > kInlineWork) return false;
  }
  return true;
}

void CpuFlash(std::span<const Attention* const> batch) {
  const cpu_flash::TileFunction run = cpu_flash::ChooseTileFunction();
  if (CpuFlashRunsInline(batch)) {
    RunInline(batch, run);
    return;
  }
  const int64_t most_rows = MostRows(batch, tbb::this_task_arena::max_concurrency());
  std::vector<Tile> tiles;
  for (const Attention* attention : batch) {
    ForEachTile(*attention, most_rows, [&](const Tile& tile) { tiles.push_back(tile); });
  }
  const auto longer = [](const Tile& x, const Tile& y) { return x.work > y.work; };
  std::stable_sort(tiles.begin(), tiles.end(), longer);
  ParallelInOrder(static_cast<int64_t>(tiles.size()),
                  [&](int64_t n) { run(tiles[static_cast<size_t>(n)], ThreadScratch()); });
}

}  // namespace attend
