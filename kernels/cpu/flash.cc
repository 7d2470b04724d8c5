// SPDX-License-Identifier: Apache-2.0
//
// The scheduler of cpu_flash and cpu_flash_amx. It cuts a batch into tiles of query rows, and the
// keys of decoded sequences into splits. The arena's threads take them wave by wave, longest first
// within a wave. Tiles depend on the number of threads, but no row's bits depend on its tile.

#include "kernels/cpu/flash.h"

#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/cpu/decode.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/parallel.h"
#include "kernels/reference/check_rows.h"

namespace attend {
namespace {

using cpu_flash::kRowTile;
using cpu_flash::Scratch;
using cpu_flash::Splits;
using cpu_flash::Tile;

// Below this, waking another thread costs more than it can save: about 40 us of one core.
constexpr double kInlineWork = 3e6;

// Tiles that are sorted and run together. Enough that threads rarely wait for each other at the
// end; few enough that the list (0.7 MiB) takes less memory than one thread's scratch.
constexpr size_t kTilesListedMax = 8192;

// Memory for the partials of the splits listed at once, at any length.
constexpr int64_t kPartialBytesMax = int64_t{2} << 20;

// Cost of a tile beside its multiply-adds, in multiply-adds.
constexpr double kTileOverhead = 20000;

// Reading a key takes a decoding thread as long as the multiply-adds of this many rows.
constexpr int64_t kDecodeRowsLeast = 4;

// The calling thread's scratch, allocated on first use and kept.
Scratch* ThreadScratch() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (scratch == nullptr) scratch.reset(new Scratch);  // unlike make_unique, does not zero it
  return scratch.get();
}

// Multiply-adds, in whole vectors, of rows [row, row + rows) of `heads` heads.
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

// Most rows of a tile.
struct MostRows {
  int64_t flash = kRowTile;
  int64_t amx = cpu_flash::kAmxRowTile;
};

// Many, since they share the packing of K and V, but few enough that every thread gets several
// tiles. Packing takes a larger share of the time in cpu_flash_amx. No row's bits depend on it.
MostRows ChooseMostRows(std::span<const Attention* const> batch, int threads) {
  double rows = 0;
  for (const Attention* attention : batch) rows += static_cast<double>(CountRows(*attention));
  const auto halve = [&](int64_t most, int64_t least, double tiles_per_thread) {
    while (most > least && rows < tiles_per_thread * threads * static_cast<double>(most)) most /= 2;
    return most;
  };
  return {halve(kRowTile, kRowTile / 4, 4), halve(cpu_flash::kAmxRowTile, kRowTile / 2, 2)};
}

// Rows of each of a head's tiles, as even as whole vectors allow.
int64_t TileRows(int64_t rows, int64_t most) {
  constexpr int64_t kVector = 16;
  const int64_t tiles = (rows + most - 1) / most;
  return ((rows + tiles - 1) / tiles + kVector - 1) / kVector * kVector;
}

const StopFlag* StopOf(std::span<const StopFlag* const> stops, size_t n) {
  return stops.empty() ? nullptr : stops[n];
}

// Walks over a batch's tiles in a fixed order, skipping stopped attentions. There can be as many
// tiles as rows, and a tile can be larger than its input, so they are never all listed.
class TileWalk {
 public:
  TileWalk(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops,
           size_t amx_from, const MostRows& most_rows)
      : batch_(batch), stops_(stops), amx_from_(amx_from), most_rows_(most_rows) {
    while (at_ < batch_.size() && !BeginSequence()) NextSequence();
  }

  // False at the end.
  bool Next(Tile& tile) {
    if (at_ == batch_.size()) return false;
    const Attention& a = *batch_[at_];
    const int64_t group = a.problem.group();
    if (decodes_) {
      tile = cpu_flash::DecodeTile(a, sequence_, b_, head_ / group);
      tile.stop = StopOf(stops_, at_);
      tile.amx = at_ >= amx_from_ && tile.heads * tile.rows > kDecodeRowsAlways;
      head_ += group;
      if (head_ == a.problem.heads_q) EndDecode();
      return true;
    }
    const int64_t heads = std::min(together_, group - head_ % group);
    const int64_t rows = std::min(tile_rows_, sequence_.q_rows - row_);
    tile = Tile{&a,
                b_,
                head_,
                heads,
                row_,
                rows,
                WorkOf(a, sequence_, heads, row_, rows),
                StopOf(stops_, at_),
                false,
                amx_};
    row_ += rows;
    if (row_ < sequence_.q_rows) return true;
    row_ = first_row_;
    head_ += heads;
    if (head_ == a.problem.heads_q) EndSequence();
    return true;
  }

 private:
  void EndSequence() {
    do {
      NextSequence();
    } while (at_ < batch_.size() && !BeginSequence());
  }
  void NextSequence() {
    if (++b_ < batch_[at_]->problem.batch && !Stopped(StopOf(stops_, at_))) return;
    b_ = 0;
    ++at_;
  }
  // False if the current sequence has no tiles.
  bool BeginSequence() {
    const Problem& p = batch_[at_]->problem;
    if (b_ >= p.batch || Stopped(StopOf(stops_, at_))) return false;
    sequence_ = SequenceOf(*batch_[at_], b_);
    if (sequence_.q_rows == 0) return false;
    decodes_ = Decodes(p, sequence_);
    // By the sequence's own rows, so that no other one changes its bits.
    amx_ = at_ >= amx_from_ && sequence_.q_len > kDecodeRows / p.group();
    BeginTiles(0);
    return true;
  }
  // The true rows are done; the padding after them is computed in tiles.
  void EndDecode() {
    decodes_ = false;
    if (sequence_.q_rows == sequence_.q_len) return EndSequence();
    BeginTiles(sequence_.q_len);
  }
  void BeginTiles(int64_t first_row) {
    const int64_t rows = sequence_.q_rows - first_row;
    head_ = 0;
    first_row_ = row_ = first_row;
    // Short heads share a tile with other heads of the same KV head.
    const Attention& a = *batch_[at_];
    const Problem& p = batch_[at_]->problem;
    const int64_t most_rows =
        amx_ ? std::min(most_rows_.amx, cpu_flash::AmxRowTile(p)) : most_rows_.flash;
    together_ = std::clamp<int64_t>(most_rows / rows, 1, a.problem.group());
    if (a.problem.dropout > 0 && (a.dropout.row | rows) % kDropoutTile != 0) together_ = 1;
    tile_rows_ = TileRows(rows, most_rows);
  }

  const std::span<const Attention* const> batch_;
  const std::span<const StopFlag* const> stops_;
  const size_t amx_from_;
  const MostRows most_rows_;
  size_t at_ = 0;  // index of the attention
  int64_t b_ = 0;
  int64_t head_ = 0;
  int64_t row_ = 0;
  int64_t first_row_ = 0;
  bool decodes_ = false;
  bool amx_ = false;
  Sequence sequence_;
  int64_t together_ = 1;
  int64_t tile_rows_ = 0;
};

struct Functions {
  cpu_flash::TileFunction tile;
  cpu_flash::TileFunction amx;
  cpu_flash::DecodeFunctions decode;
};

// One thread's unit of work: a tile, or one split of a tile's keys.
struct Task {
  Tile tile;
  int64_t split = 0;
  int64_t join = -1;  // index of the Join of the tile's splits, or -1
};

// The splits of one tile. The thread that computes the last one merges them.
struct Join {
  int64_t partials;  // index of the first float
  int64_t splits;
};

// Tasks that are sorted and run together.
class Wave {
 public:
  explicit Wave(const Functions& functions) : functions_(functions) {}

  // Takes tiles while there is room. False once the walk has ended.
  bool Fill(TileWalk* walk) {
    tasks_.clear();
    joins_.clear();
    floats_ = 0;
    constexpr int64_t kFloats = kPartialBytesMax / static_cast<int64_t>(sizeof(float));
    constexpr int64_t kJoinFloats = cpu_flash::kSplitsMax * cpu_flash::kPartialFloatsMax;
    static_assert(kFloats >= kJoinFloats);
    for (Tile tile; tasks_.size() + cpu_flash::kSplitsMax <= kTilesListedMax &&
                    floats_ + kJoinFloats <= kFloats;) {
      if (!walk->Next(tile)) return false;
      Add(tile);
    }
    return true;
  }

  void Run(const StopFlag* stop) {
    const auto longer = [](const Task& x, const Task& y) { return x.tile.work > y.tile.work; };
    std::stable_sort(tasks_.begin(), tasks_.end(), longer);
    if (floats_ > held_) {
      partials_.reset();  // first, so that both never exist at once
      partials_.reset(new float[static_cast<size_t>(floats_)]);
      held_ = floats_;
    }
    left_ = std::vector<std::atomic<int64_t>>(joins_.size());
    for (size_t n = 0; n < joins_.size(); ++n) left_[n].store(joins_[n].splits);
    ParallelInOrder(
        static_cast<int64_t>(tasks_.size()),
        [&](int64_t n) { RunTask(tasks_[static_cast<size_t>(n)], ThreadScratch()); }, stop);
  }

 private:
  void Add(const Tile& tile) {
    Task task{tile};
    const Problem& p = tile.attention->problem;
    if (!tile.decodes) {
      tasks_.push_back(task);
      return;
    }
    const Splits splits = cpu_flash::SplitsOf(p, SequenceOf(*tile.attention, tile.b));
    if (splits.count > 1) {
      task.join = static_cast<int64_t>(joins_.size());
      joins_.push_back({floats_, splits.count});
      floats_ += splits.count * cpu_flash::PartialFloats(tile);
    }
    for (int64_t n = 0; n < splits.count; ++n) {
      const KeyRange keys = splits[n];
      const int64_t rows = std::max(tile.heads * tile.rows, kDecodeRowsLeast);
      task.split = n;
      task.tile.work = static_cast<double>((keys.end - keys.begin) * (p.dim + p.dim_v) * rows);
      tasks_.push_back(task);
    }
  }

  void RunTask(const Task& task, Scratch* scratch) {
    const Tile& tile = task.tile;
    if (!tile.decodes) return (tile.amx ? functions_.amx : functions_.tile)(tile, scratch);
    if (task.join < 0) return functions_.decode.whole(tile, functions_.tile, scratch);
    const auto n = static_cast<size_t>(task.join);
    float* partials = partials_.get() + joins_[n].partials;
    functions_.decode.split(tile, task.split,
                            partials + task.split * cpu_flash::PartialFloats(tile), scratch);
    if (left_[n].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    functions_.decode.finish(tile, partials, functions_.tile, scratch);
  }

  const Functions functions_;
  std::vector<Task> tasks_;
  std::vector<Join> joins_;
  std::vector<std::atomic<int64_t>> left_;  // by Join: splits still to compute
  std::unique_ptr<float[]> partials_;
  int64_t held_ = 0;    // size of partials_
  int64_t floats_ = 0;  // in use
};

void RunInline(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops,
               size_t amx_from, const Functions& functions) {
  Scratch* scratch = ThreadScratch();
  TileWalk walk(batch, stops, amx_from, MostRows());
  for (Tile tile; walk.Next(tile);) {
    if (tile.decodes) {
      functions.decode.whole(tile, functions.tile, scratch);
    } else {
      (tile.amx ? functions.amx : functions.tile)(tile, scratch);
    }
  }
}

}  // namespace

bool CpuFlashRunsInline(std::span<const Attention* const> batch) {
  double work = 0;
  for (const Attention* attention : batch) {
    const Problem& p = attention->problem;
    // A constant-time upper bound. It ignores the mask, so some small sequences do not run inline.
    const int64_t rows = p.packed ? p.total_q : p.batch * p.len_q;
    const int64_t group_rows =
        std::max(rows * p.group(), rows == 0 ? 0 : p.batch * kDecodeRowsLeast);
    work += static_cast<double>(group_rows) * static_cast<double>(p.heads_kv) *
            static_cast<double>((p.len_k + 16) * (p.dim + p.dim_v));
    if (work > kInlineWork) return false;
  }
  return true;
}

void CpuFlash(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops,
              size_t amx_from) {
  const Functions functions{cpu_flash::ChooseTileFunction(), cpu_flash::ChooseAmxTileFunction(),
                            cpu_flash::ChooseDecodeFunctions()};
  if (CpuFlashRunsInline(batch)) {
    RunInline(batch, stops, amx_from, functions);
    return;
  }
  const MostRows most_rows = ChooseMostRows(batch, tbb::this_task_arena::max_concurrency());
  // A single attention can end the loop; in a batch the others go on.
  const StopFlag* const alone = batch.size() == 1 ? StopOf(stops, 0) : nullptr;
  TileWalk walk(batch, stops, amx_from, most_rows);
  Wave wave(functions);
  for (bool more = true; more && !Stopped(alone);) {
    more = wave.Fill(&walk);
    wave.Run(alone);
  }
}

}  // namespace attend
