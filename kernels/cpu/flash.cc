// SPDX-License-Identifier: Apache-2.0
//
// The scheduler of cpu_flash: cuts a batch into tiles and has the arena's threads take them,
// longest first.

#include "kernels/cpu/flash.h"

#include <tbb/task_arena.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/parallel.h"
#include "kernels/reference/check_rows.h"

namespace attend {
namespace {

using cpu_flash::kRowTile;
using cpu_flash::Scratch;
using cpu_flash::Tile;

// Below this, waking another thread costs more than it can save (some 40 us of one core's work).
constexpr double kInlineWork = 3e6;

// Tiles that are sorted and run together: enough for the threads to wait little for each other's
// last ones, few enough to take less memory (half a MiB) than the threads' scratch.
constexpr size_t kTilesListedMax = 8192;

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

const StopFlag* StopOf(std::span<const StopFlag* const> stops, size_t n) {
  return stops.empty() ? nullptr : stops[n];
}

// Walks over the tiles of a batch in a fixed order, past attentions that were stopped. They are as
// many as the rows may be, each larger than what made it, so that they are never all listed.
class TileWalk {
 public:
  TileWalk(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops,
           int64_t most_rows)
      : batch_(batch), stops_(stops), most_rows_(most_rows) {
    while (at_ < batch_.size() && !BeginSequence()) NextSequence();
  }

  // False at the end.
  bool Next(Tile& tile) {
    if (at_ == batch_.size()) return false;
    const Attention& a = *batch_[at_];
    const int64_t group = a.problem.group();
    const int64_t heads = std::min(together_, group - head_ % group);
    const int64_t rows = std::min(tile_rows_, sequence_.q_rows - row_);
    tile = Tile{&a,
                b_,
                head_,
                heads,
                row_,
                rows,
                WorkOf(a, sequence_, heads, row_, rows),
                StopOf(stops_, at_)};
    row_ += rows;
    if (row_ < sequence_.q_rows) return true;
    row_ = 0;
    head_ += heads;
    if (head_ < a.problem.heads_q) return true;
    do {
      NextSequence();
    } while (at_ < batch_.size() && !BeginSequence());
    return true;
  }

 private:
  void NextSequence() {
    if (++b_ < batch_[at_]->problem.batch && !Stopped(StopOf(stops_, at_))) return;
    b_ = 0;
    ++at_;
  }
  // False if the present one has no tiles.
  bool BeginSequence() {
    const Problem& p = batch_[at_]->problem;
    head_ = row_ = 0;
    if (b_ >= p.batch || Stopped(StopOf(stops_, at_))) return false;
    sequence_ = SequenceOf(*batch_[at_], b_);
    if (sequence_.q_rows == 0) return false;
    // Short sequences share a tile with other heads of the same KV head.
    together_ = std::clamp<int64_t>(most_rows_ / sequence_.q_rows, 1, p.group());
    tile_rows_ = TileRows(sequence_.q_rows, most_rows_);
    return true;
  }

  const std::span<const Attention* const> batch_;
  const std::span<const StopFlag* const> stops_;
  const int64_t most_rows_;
  size_t at_ = 0;  // of the attention
  int64_t b_ = 0;
  int64_t head_ = 0;
  int64_t row_ = 0;
  Sequence sequence_;
  int64_t together_ = 1;
  int64_t tile_rows_ = 0;
};

void RunInline(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops,
               cpu_flash::TileFunction run) {
  Scratch* scratch = ThreadScratch();
  TileWalk walk(batch, stops, kRowTile);
  for (Tile tile; walk.Next(tile);) run(tile, scratch);
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

void CpuFlash(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops) {
  const cpu_flash::TileFunction run = cpu_flash::ChooseTileFunction();
  if (CpuFlashRunsInline(batch)) {
    RunInline(batch, stops, run);
    return;
  }
  const int64_t most_rows = MostRows(batch, tbb::this_task_arena::max_concurrency());
  const auto longer = [](const Tile& x, const Tile& y) { return x.work > y.work; };
  // The others of a batch would go on, so only one that is alone can end the loop.
  const StopFlag* const alone = batch.size() == 1 ? StopOf(stops, 0) : nullptr;
  TileWalk walk(batch, stops, most_rows);
  std::vector<Tile> tiles;
  do {
    tiles.clear();
    for (Tile tile; tiles.size() < kTilesListedMax && walk.Next(tile);) tiles.push_back(tile);
    std::stable_sort(tiles.begin(), tiles.end(), longer);
    ParallelInOrder(
        static_cast<int64_t>(tiles.size()),
        [&](int64_t n) { run(tiles[static_cast<size_t>(n)], ThreadScratch()); }, alone);
  } while (tiles.size() == kTilesListedMax && !Stopped(alone));
}

}  // namespace attend
