// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/flash_gradients_plan.h"

#include <algorithm>
#include <memory>

namespace attend::cpu_flash {
namespace {

// Tasks to cut a sequence into: down to slabs of one key tile at least, more if slabs have many
// keys. Each slab finds its rows' terms and makes a part of dQ. Cuts affect bits, so they do not
// depend on the number of sequences.
constexpr int64_t kTasksLeast = 32;
constexpr int64_t kTasksWanted = 64;
constexpr int64_t kSlabKeys = 5 * kGradientKeys;
constexpr int64_t kSlabKeysMax = 20 * kGradientKeys;

// Memory for partial sums: one slab's part of dQ, and all parts of a KV head.
constexpr int64_t kPartFloats = (int64_t{1} << 20) / sizeof(float);
constexpr int64_t kPartsFloats = (int64_t{64} << 20) / sizeof(float);

}  // namespace

KeyHead MakeKeyHead(const Attention& a, int64_t b, int64_t h_kv) {
  const Problem& p = a.problem;
  KeyHead head{.b = b, .h_kv = h_kv, .sequence = SequenceOf(a, b)};
  const Sequence& s = head.sequence;
  if (s.k_len > 0) {
    const int64_t few = std::min(CeilDiv(kTasksLeast, p.heads_kv), CeilDiv(s.k_len, kGradientKeys));
    const int64_t many = std::min(CeilDiv(kTasksWanted, p.heads_kv), s.k_len / kSlabKeys);
    head.slabs = std::max({few, many, CeilDiv(s.k_len, kSlabKeysMax)});
  }
  const int64_t floats = std::min(kPartFloats, kPartsFloats / std::max<int64_t>(1, head.slabs));
  const int64_t most = std::max(kGradientRows, floats / PaddedDim(p.dim));
  const int64_t q_len = std::max<int64_t>(1, s.q_len);
  head.heads = std::clamp<int64_t>(most / q_len, 1, p.group());
  head.row_bands = CeilDiv(q_len, most);
  head.rows = CeilDiv(CeilDiv(q_len, head.row_bands), kGradientRows) * kGradientRows;
  if (head.row_bands == 1) head.rows = q_len;
  head.row_bands = CeilDiv(q_len, head.rows);
  head.bands = CeilDiv(p.group(), head.heads) * head.row_bands;
  head.part = head.band_rows() * PaddedDim(p.dim);
  return head;
}

GradientTask WholeHead(const Attention& a, const Gradients& g, int64_t b, int64_t h_kv) {
  const Problem& p = a.problem;
  const Sequence s = SequenceOf(a, b);
  return {.attention = &a,
          .gradients = &g,
          .sequence = s,
          .b = b,
          .head = h_kv * p.group(),
          .heads = p.group(),
          .row = 0,
          .rows = s.q_len,
          .keys = {0, s.k_len}};
}

RowsKeys KeysOfRows(const GradientTask& task, int64_t first, int64_t count) {
  const Mask& mask = task.attention->problem.mask;
  RowsKeys keys{{task.sequence.k_len, 0}, {0, task.sequence.k_len}};
  while (count > 0) {  // head after head: within one, both ends never fall
    const int64_t i = task.RowAt(first) % task.rows;
    const int64_t rows = task.listed != nullptr ? 1 : std::min(count, task.rows - i);
    const KeyRange low = VisibleKeys(mask, task.sequence, task.row + i);
    const KeyRange high = VisibleKeys(mask, task.sequence, task.row + i + rows - 1);
    keys.any.begin = std::min(keys.any.begin, low.begin);
    keys.any.end = std::max(keys.any.end, high.end);
    keys.all.begin = std::max(keys.all.begin, high.begin);
    keys.all.end = std::min(keys.all.end, low.end);
    first += rows;
    count -= rows;
  }
  return keys;
}

double WorkOf(const GradientTask& task) {
  double pairs = 0;
  const int64_t end = task.listed != nullptr ? task.count() : task.rows;  // heads are alike
  for (int64_t i = 0; i < end; i += kGradientRows) {
    const int64_t rows = std::min(kGradientRows, end - i);
    const KeyRange any = KeysOfRows(task, i, rows).any;
    const int64_t keys = std::min(any.end, task.keys.end) - std::max(any.begin, task.keys.begin);
    pairs += static_cast<double>(rows) * static_cast<double>(std::max<int64_t>(0, keys));
  }
  return pairs * static_cast<double>(task.heads);
}

GradientScratch* ThreadScratch() {
  thread_local std::unique_ptr<GradientScratch> scratch;
  if (scratch == nullptr) scratch.reset(new GradientScratch);  // not make_unique: no zeroing
  return scratch.get();
}

}  // namespace attend::cpu_flash
