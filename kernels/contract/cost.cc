// SPDX-License-Identifier: Apache-2.0
//
// Cost of a sequence = (visible pairs, rounded up to tiles) * (D + Dv + the softmax's and score
// terms' share) + per-tile, per-key and per-row overheads, with constants per kernel fitted to
// measurements. Sequences of equal shape are computed once. Everything is a double: 2^30 rows
// squared times heads exceeds 64 bits.

#include "kernels/contract/cost.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/contract/decode_rule.h"

namespace attend {
namespace {

// Overheads are in multiply-adds of the fast kernel of the same kind of device. `slower` scales
// their sum.
struct KernelModel {
  double slower;        // than the fast kernel
  double slower_half;   // the same for 16-bit Q, K and V
  double pair;          // per pair, beside D + Dv: exponential, maximum, sum
  double dims = 1;      // share of D + Dv that a pair counts: of a matrix unit beside other units
  double backward = 1;  // cost of the backward pass's products, of the forward pass's
  double softcap = 0;   // further cost per pair, if the problem has it
  double bias = 0;
  double alibi = 0;
  double dropout = 0;
  double key_dim = 0;   // per key that a tile reads, times D + Dv: packing
  double key = 0;       // per key that a tile reads
  double lane_dim = 0;  // per row, rounding included, times D + Dv
  double row_dim = 0;   // per row, times D + Dv: Q in, O out
  double row = 0;
  double tile = 0;            // per tile of rows
  int64_t tile_rows = 1;      // of one head, or of short heads that share a KV head
  int64_t vector_rows = 1;    // a tile's rows are rounded up to a multiple of this
  double edge_keys = 0;       // computed per row beyond the visible ones
  double read_byte = 0;       // per byte of K and V, where decoding is memory-bound
  double copied = 0;          // per element of a Q, K or V whose D is not a multiple of 8
  bool decodes = false;       // decodes short sequences (decode_rule.h)
  bool shares_heads = false;  // short heads of one KV head share a tile
  bool hidden_pairs = false;  // computes masked pairs too
};

// Both decoding kernels: memory traffic of K and V dominates up to some 64 rows of a tile, which
// has rows of all heads of a group; with more, products do.
constexpr KernelModel kCudaDecode = {.slower = 1,
                                     .slower_half = 1,
                                     .pair = 100,
                                     .softcap = 40,
                                     .alibi = 20,
                                     .key_dim = 200,
                                     .tile = 1e6,
                                     .tile_rows = 128,
                                     .vector_rows = 16,
                                     .edge_keys = 64,
                                     .shares_heads = true};

constexpr KernelModel kCpuFlash = {.slower = 1,
                                   .slower_half = 1,
                                   .pair = 22,
                                   .softcap = 60,
                                   .bias = 60,
                                   .alibi = 20,
                                   .dropout = 16,
                                   .key_dim = 20,
                                   .key = 100,
                                   .lane_dim = 8,
                                   .row_dim = 20,
                                   .row = 1000,
                                   .tile = 9000,
                                   .tile_rows = 192,
                                   .vector_rows = 16,
                                   .edge_keys = 64,
                                   .read_byte = 1.8,
                                   .decodes = true,
                                   .shares_heads = true};

// Products and the packing of keys cost less.
constexpr KernelModel CpuFlashAmx() {
  KernelModel model = kCpuFlash;
  model.pair = 20;
  model.dims = 0.25;
  model.backward = 1.7;
  model.key_dim = 4;
  model.key = 50;
  model.edge_keys = 32;
  return model;
}

// Indexed by KernelId. README.md beside this file says where the numbers come from.
constexpr std::array<KernelModel, kKernelCount> kModels = {{
    {.slower = 19,
     .slower_half = 23,
     .pair = 95,
     .softcap = 60,
     .bias = 5,
     .alibi = 5,
     .dropout = 40,
     .row_dim = 1,
     .row = 250},
    kCpuFlash,
    CpuFlashAmx(),
    {.slower = 63,
     .slower_half = 63,
     .pair = 53,
     .softcap = 10,
     .bias = 10,
     .alibi = 10,
     .dropout = 3,
     .tile = 2e4,
     .tile_rows = 64,
     .vector_rows = 64,
     .hidden_pairs = true},
    {.slower = 21,
     .slower_half = 40,
     .pair = 10,
     .softcap = 10,
     .bias = 10,
     .alibi = 5,
     .dropout = 240,
     .tile = 5e4,
     .tile_rows = 64,
     .vector_rows = 64,
     .edge_keys = 64},
    {.slower = 2,
     .slower_half = 2,
     .pair = 37,
     .softcap = 40,
     .bias = 40,
     .alibi = 20,
     .dropout = 210,
     .tile = 5e5,
     .tile_rows = 64,
     .vector_rows = 64,
     .edge_keys = 64},
    {.slower = 1,
     .slower_half = 1,
     .pair = 80,
     .softcap = 80,
     .bias = 100,
     .alibi = 20,
     .dropout = 210,
     .tile = 1e6,
     .tile_rows = 128,
     .vector_rows = 128,
     .edge_keys = 128,
     .copied = 430},
    kCudaDecode,
    kCudaDecode,
}};

constexpr double kCpuPerThread = 90e9;
constexpr double kHopperPerMultiprocessor = 6.5e12;
constexpr double kAmperePerMultiprocessor = 4e12;
constexpr int kHopper = 90;

double RoundUp(double value, double unit) { return std::ceil(value / unit) * unit; }

// Multiply-adds of all query heads of one KV head.
double SequenceCost(const Problem& p, const KernelModel& m, const Sequence& s) {
  if (s.q_rows == 0) return 0;
  const int64_t group = p.group();
  const int64_t together =
      m.shares_heads ? std::clamp<int64_t>(m.tile_rows / s.q_rows, 1, group) : 1;
  const double heads = static_cast<double>(group);
  const double rows = static_cast<double>(s.q_rows);
  const double keys = static_cast<double>(s.k_len);
  const double tiles_of_rows = std::ceil(rows / static_cast<double>(m.tile_rows));
  const double tiles = std::ceil(heads / static_cast<double>(together)) * tiles_of_rows;
  // Rows including those that tiles are rounded up by.
  const double full = rows * heads;
  const double lanes = tiles * RoundUp(full / tiles, static_cast<double>(m.vector_rows));
  double pairs = static_cast<double>(s.q_len) * keys;
  if (!m.hidden_pairs && !p.mask.unrestricted()) {
    pairs = std::min(pairs, VisiblePairs(p.mask, s) + m.edge_keys * static_cast<double>(s.q_len));
  }
  const double seen = pairs / rows;  // average visible keys of a row, and about those of a tile
  const double dims = static_cast<double>(p.dim + p.dim_v);
  double pair = m.dims * dims + m.pair;
  if (p.softcap > 0) pair += m.softcap;
  if (p.has_bias) pair += m.bias;
  if (p.has_alibi) pair += m.alibi;
  if (p.dropout > 0) pair += m.dropout;
  const double true_rows = static_cast<double>(s.q_len) * heads;
  const double key_bytes = dims * static_cast<double>(DTypeBytes(p.dtype));
  if (m.decodes && Decodes(p, s)) {
    // Multiplying the rows overlaps with loading the next keys: the slower of the two counts.
    const double key = std::max(true_rows * pair, key_bytes * m.read_byte);
    return pairs / static_cast<double>(s.q_len) * key + m.tile + full * (m.row_dim * dims + m.row);
  }
  const double copied_dim = static_cast<double>(p.dim % 8 == 0 ? 0 : p.dim);
  const double copied_dim_v = static_cast<double>(p.dim_v % 8 == 0 ? 0 : p.dim_v);
  const double copied = full * copied_dim + keys * (copied_dim + copied_dim_v);
  return m.copied * copied + seen * lanes * pair +
         tiles * (m.tile + seen * (m.key_dim * dims + m.key)) + lanes * m.lane_dim * dims +
         full * (m.row_dim * dims + m.row);
}

}  // namespace

double Cost(const Attention& attention, KernelId kernel) {
  const Problem& p = attention.problem;
  const KernelModel& model = kModels[static_cast<size_t>(kernel)];
  const bool alike = !p.packed && attention.q_lengths == nullptr && attention.kv_lengths == nullptr;
  double sum = 0;
  if (alike && p.batch > 0) {
    sum = static_cast<double>(p.batch) * SequenceCost(p, model, SequenceOf(attention, 0));
  }
  for (int64_t b = 0; !alike && b < p.batch; ++b) {
    sum += SequenceCost(p, model, SequenceOf(attention, b));
  }
  const bool half = p.dtype != DType::kFloat32;
  return 2 * static_cast<double>(p.heads_kv) * (half ? model.slower_half : model.slower) * sum;
}

double BackwardCost(const Attention& attention, KernelId kernel) {
  const Problem& p = attention.problem;
  const double products = static_cast<double>(3 * p.dim + 2 * p.dim_v);
  return Cost(attention, kernel) * kModels[static_cast<size_t>(kernel)].backward * products /
         static_cast<double>(p.dim + p.dim_v);
}

double CostPerSecond(const DeviceInfo& device) {
  const double units = std::max(1, device.units);
  if (device.kind == DeviceKind::kCpu) return kCpuPerThread * units;
  return units * (device.compute_capability >= kHopper ? kHopperPerMultiprocessor
                                                       : kAmperePerMultiprocessor);
}

}  // namespace attend
