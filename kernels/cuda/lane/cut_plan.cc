// SPDX-License-Identifier: Apache-2.0
//
// Models a three-stage pipeline (copy in, kernel, copy out): n parts take in + kernel + out of one
// part, plus n - 1 times the slowest stage. The number of parts minimises that estimate, subject to
// a bound on the longest launch, which keeps small requests from waiting behind large ones. All
// rates are constants of an H200, so that the cut is the same on every device.

#include "kernels/cuda/lane/cut_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "kernels/contract/cost.h"
#include "kernels/cuda/launch/launch.h"

namespace attend::cuda {
namespace {

constexpr int64_t kUnits = 132;  // multiprocessors of an H200
constexpr double kWavesLeast = 3;

// Measured on an H200 with long sequences (tests/bench/KERNELS.md).
double FlopsPerSecond(KernelId kernel, const Problem& p) {
  switch (kernel) {
    case KernelId::kCudaFlashSm90:
      return 650e12;
    case KernelId::kCudaFlashSm80:
      return 340e12;
    case KernelId::kCudaFlashFp32:
      return 36e12;
    case KernelId::kCudaDecodeSm80:
    case KernelId::kCudaDecodeSm90:
      // K and V are read at some 4 TB/s, a multiply-add for each byte and row of a KV head, until
      // products take the time.
      return std::min(300e12, 3.8e12 * static_cast<double>(p.len_q * p.heads_q) /
                                  static_cast<double>(p.heads_kv));
    default:
      return 10e12;
  }
}

// FLOPs that take as long, at FlopsPerSecond, as the attention including its dropout.
double TimedFlops(const Attention& a, KernelId kernel) {
  if (a.problem.dropout == 0) return Flops(a);
  Attention without = a;
  without.problem.dropout = 0;
  const double cost = attend::Cost(without, kernel);
  return cost > 0 ? Flops(a) * attend::Cost(a, kernel) / cost : 0;
}

struct Cost {
  double in_bytes = 0;
  double out_bytes = 0;
  double flops = 0;
  double tile_rows = 0;  // of the whole problem's variant
  double tiles = 0;
  bool uneven = false;  // causal: the last rows see most keys
};

double TileRows(KernelId kernel, const Problem& p) {
  const std::span<const FlashVariant> variants = VariantsFor(kernel, p);
  return variants.empty() ? 128 : static_cast<double>(variants.front().rows);
}

Cost CostOf(const Attention& a, KernelId kernel) {
  const Problem& p = a.problem;
  const auto size = static_cast<double>(DTypeBytes(p.dtype));
  Cost cost;
  cost.in_bytes = size * static_cast<double>(ElementsQ(p) + ElementsK(p) + ElementsV(p));
  if (p.has_bias) {
    const auto rows =
        static_cast<double>(p.len_q) * static_cast<double>((a.bias.stride_b == 0 ? 1 : p.batch) *
                                                           (a.bias.stride_h == 0 ? 1 : p.heads_q));
    cost.in_bytes += rows * static_cast<double>(RowBytes(a.bias.dtype, p.len_k));
  }
  cost.out_bytes = static_cast<double>(BytesO(p));
  cost.flops = TimedFlops(a, kernel);
  cost.tile_rows = TileRows(kernel, p);
  const auto batch = static_cast<double>(p.batch);
  const double tiles = p.packed ? static_cast<double>(p.total_q) / cost.tile_rows + batch
                                : batch * std::ceil(static_cast<double>(p.len_q) / cost.tile_rows);
  cost.tiles = std::max(1.0, tiles * static_cast<double>(p.heads_q));
  cost.uneven = p.mask.right >= 0 && p.mask.left < 0;
  return cost;
}

// Number of parts along each dimension.
struct Grid {
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t rows = 1;
  int64_t parts() const { return batch * heads * rows; }
};

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid of `parts`, or a few more if the dimensions do not divide evenly, or as many as possible.
Grid GridOf(const Attention& a, int64_t parts) {
  const Problem& p = a.problem;
  Grid grid;
  grid.batch = std::min(parts, p.batch);
  grid.heads = std::min(DivideUp(parts, grid.batch), p.heads_kv);
  if (RowsCanBeSliced(a)) {
    grid.rows = std::min(DivideUp(parts, grid.batch * grid.heads), DivideUp(p.len_q, kCutRows));
  }
  return grid;
}

// The largest part's share of all tiles, as sequences and heads may not divide evenly.
double LargestShare(const Problem& p, const Grid& grid) {
  const auto share = [](int64_t size, int64_t parts) {
    return static_cast<double>(DivideUp(size, parts)) / static_cast<double>(size);
  };
  return share(p.batch, grid.batch) * share(p.heads_kv, grid.heads) *
         (grid.rows == 1 ? 1 : share(DivideUp(p.len_q, kCutRows), grid.rows));
}

// Duration of an average tile.
double TileSeconds(const Cost& cost, double rate) {
  return cost.flops / cost.tiles / (rate / kUnits);
}

// Duration of the largest part's kernel, with average tiles.
double KernelSeconds(const Problem& p, const Cost& cost, const Grid& grid, double rate) {
  const double waves = std::ceil(cost.tiles * LargestShare(p, grid) / kUnits);
  return waves * TileSeconds(cost, rate);
}

// From the first byte in to the last byte out, with the parts pipelined through three stages.
double EstimateSeconds(const Problem& p, const Cost& cost, const Grid& grid, double rate,
                       const CutBounds& bounds) {
  const auto parts = static_cast<double>(grid.parts());
  const double in = cost.in_bytes / bounds.bus_bytes_per_second / parts;
  const double out = cost.out_bytes / bounds.bus_bytes_per_second / parts;
  const double kernel = KernelSeconds(p, cost, grid, rate);
  const double slowest = std::max({in, kernel, out, bounds.seconds_per_part});
  return in + kernel + out + (parts - 1) * slowest;
}

// For an attention whose duration requires many parts: the number of parts, up to `most`, that
// finishes first with no launch too long.
int64_t ChooseLaunches(const Attention& a, const Cost& cost, double rate, int64_t most,
                       const CutBounds& bounds) {
  const double uneven = cost.uneven ? 2 : 1;  // worst case for parts cut by rows
  const double tiles_seconds = kWavesLeast * TileSeconds(cost, rate);
  int64_t best = most;
  double best_seconds = std::numeric_limits<double>::infinity();
  for (int64_t parts = bounds.parts_min; parts <= most; ++parts) {
    const Grid grid = GridOf(a, parts);
    const double longest = grid.rows > 1 ? uneven : 1;
    const double launch = longest * KernelSeconds(a.problem, cost, grid, rate);
    if (launch > std::max(bounds.launch_seconds_max, longest * tiles_seconds)) continue;
    const double seconds = EstimateSeconds(a.problem, cost, grid, rate, bounds);
    if (seconds >= best_seconds) continue;
    best = parts;
    best_seconds = seconds;
  }
  return best;
}

// The number of parts that finishes first with no launch too long.
int64_t ChooseParts(const Attention& a, KernelId kernel, const CutBounds& bounds) {
  const Cost cost = CostOf(a, kernel);
  const double rate = FlopsPerSecond(kernel, a.problem);
  const double uneven = cost.uneven ? 2 : 1;
  const double launches = std::ceil(uneven * cost.flops / rate / bounds.launch_seconds_max);
  const auto least = static_cast<int64_t>(
      std::min<double>(kCutPartsMost, std::max<double>(bounds.parts_min, launches)));
  const double bytes = cost.in_bytes + cost.out_bytes;
  const bool small = bytes < static_cast<double>(bounds.item_bytes_min);
  if (small || least > bounds.parts_max) return ChooseLaunches(a, cost, rate, least, bounds);
  int64_t best = least;
  double best_seconds = 0;
  for (int64_t parts = least; parts <= bounds.parts_max; ++parts) {
    const double part_bytes = bytes / static_cast<double>(parts);
    if (parts > least && part_bytes < static_cast<double>(bounds.part_bytes_min)) break;
    const double seconds = EstimateSeconds(a.problem, cost, GridOf(a, parts), rate, bounds);
    if (parts > least && seconds >= best_seconds) continue;
    best = parts;
    best_seconds = seconds;
  }
  return best;
}

bool SameVariants(KernelId kernel, const Problem& a, const Problem& b) {
  const std::span<const FlashVariant> of_a = VariantsFor(kernel, a);
  const std::span<const FlashVariant> of_b = VariantsFor(kernel, b);
  return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                    [](const FlashVariant& x, const FlashVariant& y) {
                      return x.kernel == y.kernel && x.shared_bytes == y.shared_bytes;
                    });
}

// Appends `next` to `slice` if it continues it in one dimension. False if it does not, or must not
// be joined.
bool Join(const Attention& a, const AttentionSlice& next, AttentionSlice* slice) {
  const bool batch = slice->batch_begin == next.batch_begin && slice->batch_end == next.batch_end;
  const bool heads = slice->heads_begin == next.heads_begin && slice->heads_end == next.heads_end;
  const bool rows = slice->rows_begin == next.rows_begin && slice->rows_end == next.rows_end;
  if (batch && rows && slice->heads_end == next.heads_begin) {
    slice->heads_end = next.heads_end;
  } else if (heads && rows && slice->batch_end == next.batch_begin) {
    slice->batch_end = next.batch_end;
  } else if (batch && heads && slice->rows_end == next.rows_begin &&
             a.problem.mask.unrestricted()) {
    slice->rows_end = next.rows_end;
  } else {
    return false;
  }
  return true;
}

// Where the n-th of `parts` begins: evenly, at multiples of `unit`.
int64_t Cut(int64_t size, int64_t unit, int64_t parts, int64_t n) {
  return std::min(size, DivideUp(size, unit) * n / parts * unit);
}

// Joins each part to its predecessors while the result has at most `flops_max`.
std::vector<AttentionSlice> JoinUpTo(const Attention& a, KernelId kernel, const CutBounds& bounds,
                                     const std::vector<AttentionSlice>& parts, double flops_max) {
  auto spare = static_cast<int64_t>(parts.size()) - std::max(bounds.parts_min, 1);
  std::vector<AttentionSlice> joined;
  for (const AttentionSlice& part : parts) {
    AttentionSlice both = joined.empty() ? part : joined.back();
    if (spare <= 0 || joined.empty() || !Join(a, part, &both)) {
      joined.push_back(part);
      continue;
    }
    const Result<Attention> one = TakeSlice(a, part);
    const Result<Attention> large = TakeSlice(a, both);
    if (!one.ok() || !large.ok() || TimedFlops(*large, kernel) > flops_max ||
        !SameVariants(kernel, one->problem, large->problem)) {
      joined.push_back(part);
      continue;
    }
    joined.back() = both;
    --spare;
  }
  return joined;
}

}  // namespace

std::vector<AttentionSlice> PlanParts(const Attention& a, KernelId kernel,
                                      const CutBounds& bounds) {
  const Problem& p = a.problem;
  if (p.page_rows > 0) return {};  // K and V are on the device: little to copy
  if (p.batch == 0 || p.len_q == 0 || (p.packed && p.total_q == 0)) return {};
  const Grid grid = GridOf(a, ChooseParts(a, kernel, bounds));
  if (grid.parts() <= 1) return {};
  std::vector<AttentionSlice> parts;
  for (int64_t b = 0; b < grid.batch; ++b) {
    for (int64_t h = 0; h < grid.heads; ++h) {
      for (int64_t r = 0; r < grid.rows; ++r) {
        parts.push_back({Cut(p.batch, 1, grid.batch, b), Cut(p.batch, 1, grid.batch, b + 1),
                         Cut(p.heads_kv, 1, grid.heads, h), Cut(p.heads_kv, 1, grid.heads, h + 1),
                         Cut(p.len_q, kCutRows, grid.rows, r),
                         Cut(p.len_q, kCutRows, grid.rows, r + 1)});
      }
    }
  }
  return parts;
}

std::vector<AttentionSlice> JoinParts(const Attention& a, KernelId kernel, const CutBounds& bounds,
                                      const std::vector<AttentionSlice>& parts) {
  const double flops_max = bounds.in_place_seconds_max * FlopsPerSecond(kernel, a.problem);
  std::vector<AttentionSlice> joined = JoinUpTo(a, kernel, bounds, parts, flops_max);
  if (joined.size() < 2) return joined;
  // If parts were filled to the limit in order, all but the last would be long, and after a short
  // last one the GPU would idle until the next attention arrives. Use the same number of parts with
  // equal lengths instead.
  double most = 0;
  for (const AttentionSlice& slice : parts) {
    const Result<Attention> part = TakeSlice(a, slice);
    if (part.ok()) most = std::max(most, TimedFlops(*part, kernel));
  }
  // Parts may not add up to an even share exactly, but exceed it by less than one part.
  const double share = TimedFlops(a, kernel) / static_cast<double>(joined.size());
  for (const double above : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    const double even_max = 1.0001 * (share + above * most);
    if (even_max >= flops_max) break;
    std::vector<AttentionSlice> even = JoinUpTo(a, kernel, bounds, parts, even_max);
    if (even.size() == joined.size()) return even;
  }
  return joined;
}

}  // namespace attend::cuda
