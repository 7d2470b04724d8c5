// SPDX-License-Identifier: Apache-2.0
//
// Per-row work of the backward pass outside its products: delta, and storing rows of gradients.
// Included once per instruction set by flash_gradients_tile.cc.

#if defined(ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_
#undef ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_
#else
#define ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/reference/reference_gradients.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// Neighbouring vectors, from an even division of all.
struct LanePanel {
  int64_t lane = 0;
  int vectors = 0;
  int64_t width() const { return vectors * kLanes; }
};

HWY_INLINE int64_t CountVectors(int64_t lanes) { return (lanes + kLanes - 1) / kLanes; }
// AMX's panels begin at multiples of their lanes.
constexpr int64_t kAmxPanelVectors = kAmxPanelLanes / kLanes;
HWY_INLINE int64_t CountPanels(int64_t lanes, bool amx = false) {
  const int64_t most = amx ? kAmxPanelVectors : kPanelVectors;
  return (CountVectors(lanes) + most - 1) / most;
}
HWY_INLINE LanePanel PanelOf(int64_t lanes, int64_t n, bool amx = false) {
  const int64_t vectors = CountVectors(lanes);
  if (amx) {
    const int64_t left = vectors - n * kAmxPanelVectors;
    return {n * kAmxPanelLanes, static_cast<int>(std::min(left, kAmxPanelVectors))};
  }
  const int64_t count = CountPanels(lanes);
  const int64_t first = n * vectors / count;
  return {first * kLanes, static_cast<int>((n + 1) * vectors / count - first)};
}

HWY_INLINE int64_t RowElement(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t stride_b,
                              int64_t stride_h, int64_t stride_l) {
  return b * stride_b + h * stride_h + (s.q_row + i) * stride_l;
}

HWY_INLINE bool AllFinite(const float* row, int64_t dim) {
  const F32 d;
  V32 zero = hn::Zero(d);
  int64_t n = 0;
  for (; n + kLanes <= dim; n += kLanes) {
    zero = hn::MulAdd(hn::LoadU(d, row + n), hn::Zero(d), zero);
  }
  float rest = 0;
  for (; n < dim; ++n) rest += row[n] * 0.0f;
  return rest == 0 && hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

HWY_INLINE float DotRows(const float* x, const float* y, int64_t dim) {
  const F32 d;
  V32 sum = hn::Zero(d);
  int64_t n = 0;
  for (; n + kLanes <= dim; n += kLanes) {
    sum = hn::MulAdd(hn::LoadU(d, x + n), hn::LoadU(d, y + n), sum);
  }
  float dot = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; n < dim; ++n) dot += x[n] * y[n];
  return dot;
}

// Index of a row's LSE and dLSE.
HWY_INLINE int64_t LseElement(const Attention& a, const Sequence& s, const RowId& id) {
  return RowElement(s, id.b, id.h, id.i, a.lse_stride_b, a.lse_stride_h, 1);
}
HWY_INLINE float DLseOf(const Attention& a, const Gradients& g, const Sequence& s,
                        const RowId& id) {
  return g.d_lse == nullptr ? 0.0f : g.d_lse[LseElement(a, s, id)];
}

// Computes a row's terms from its Q and dO in fp32. `row` is memory for O.
HWY_INLINE RowTerms FindTerms(const Attention& a, const Gradients& g, const RowTerms* measured,
                              const Sequence& s, const RowId& id, const float* q, const float* d_o,
                              float* row) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const Problem& p = a.problem;
  const float d_lse = DLseOf(a, g, s, id);
  const auto load_o = [&] {
    WidenRow(a.o.data, p.o_dtype(),
             RowElement(s, id.b, id.h, id.i, a.o.stride_b, a.o.stride_h, a.o.stride_l), p.dim_v,
             row);
  };
  RowTerms terms;
  if (measured != nullptr) terms = measured[TermsIndex(p, s, id)];
  terms.special = !AllFinite(q, p.dim);
  // If dropout or a mask leaves the row no key, `less` does not show whether dO is finite.
  if (terms.known && !AllFinite(d_o, p.dim_v)) terms.less = kNan;
  if (!terms.known) {
    load_o();
    const float delta = DotRows(d_o, row, p.dim_v);
    const float lse = a.lse[LseElement(a, s, id)];
    terms.special = terms.special || std::isnan(lse);
    // A row that sees nothing has LSE -inf, and -inf - -inf would be NaN. If LSE is infinite or NaN
    // for another reason, such as a finite slope, fp32 has overflowed, and NaN sends the KV head to
    // the reference.
    const KeyRange range = VisibleKeys(p.mask, s, id.i);
    const bool slope = p.has_alibi && std::isfinite(a.alibi_slopes[id.b * a.alibi_stride_b + id.h]);
    const bool none = lse < 0 && (range.begin >= range.end || p.has_bias || !slope);
    terms.base = std::isfinite(lse) ? lse : none ? 0 : kNan;
    terms.less = g.d_lse == nullptr ? delta : delta - d_lse;
    terms.known = true;
  }
  if (std::isfinite(terms.less)) return terms;
  load_o();
  const bool finite = AllFinite(d_o, p.dim_v);
  terms.special = terms.special || !finite || !AllFinite(row, p.dim_v) || !std::isfinite(d_lse);
  // Products with V are then Inf of either sign, so their sum has no value.
  if (!finite) terms.less = kNan;
  return terms;
}

// The sink's weight in a row.
HWY_INLINE double SinkWeight(const Attention& a, const RowTerms* measured, const Sequence& s,
                             const RowId& id) {
  if (measured != nullptr) {
    const RowTerms& terms = measured[TermsIndex(a.problem, s, id)];
    if (terms.known) return static_cast<double>(terms.sink);
  }
  return std::exp(static_cast<double>(a.sinks[id.h]) -
                  static_cast<double>(a.lse[LseElement(a, s, id)]));
}

// Loads a row of Q and of dO as fp32.
HWY_INLINE void LoadQuery(const Attention& a, const Gradients& g, const Sequence& s,
                          const RowId& id, float* q, float* d_o) {
  const Problem& p = a.problem;
  const auto element = [&](const ConstTensorView& view) {
    return RowElement(s, id.b, id.h, id.i, view.stride_b, view.stride_h, view.stride_l);
  };
  WidenRow(a.q.data, p.dtype, element(a.q), p.dim, q);
  WidenRow(g.d_o.data, p.o_dtype(), element(g.d_o), p.dim_v, d_o);
}

// Adds up all parts of one row of dQ.
HWY_INLINE void SumParts(const PartialQueries& parts, int64_t row, int64_t width, float* sum) {
  const F32 d;
  std::fill_n(sum, width, 0.0f);
  for (int64_t n = 0; n < parts.count; ++n) {
    if (parts.computed[n] == 0) continue;
    const float* const part = parts.first + n * parts.stride + row * width;
    for (int64_t i = 0; i < width; i += kLanes) {
      hn::Store(hn::Add(hn::Load(d, sum + i), hn::Load(d, part + i)), d, sum + i);
    }
  }
}

// Over a row's keys and its sink, dS sums to dLSE; the difference is delta's error. The error times
// sum P K is in dQ, and times P in dS; their 2-norms are compared. An error up to 1.25 times what
// rounding to the dtype may cost is accepted, which ordinary rows seldom exceed; in fp32, as much
// as rounding scores of some hundreds costs. Squares near the end of fp32's range are not compared.
// `d_q` is the row's sum, or null.
HWY_INLINE RowError ErrorOf(const GradientTask& task, const PartialQueries& parts, int64_t row,
                            const float* d_q) {
  const Attention& a = *task.attention;
  const Problem& p = a.problem;
  float error = 0, square = 0, norm = 0;
  const RowTerms* terms = nullptr;
  for (int64_t n = 0; n < parts.count; ++n) {
    const RowState& state = parts.states[n * parts.states_stride + row];
    if (parts.computed[n] == 0 || !state.terms.known) continue;
    terms = &state.terms;
    error += state.sums.d_scores;
    square += state.sums.squares;
    norm += state.sums.norms;
  }
  if (terms == nullptr) return {};
  const RowId id{task.b, task.head + row / task.rows, task.row + row % task.rows};
  const bool measured =
      task.measured != nullptr && task.measured[TermsIndex(p, task.sequence, id)].known;
  // An O in fp32 spoils nothing. Whether other rows were measured must not affect this one.
  if (p.o_dtype() == DType::kFloat32 && !measured) return {};
  if (p.has_sinks) {
    const double sink = SinkWeight(a, task.measured, task.sequence, id);
    error -= static_cast<float>(sink * static_cast<double>(terms->less));
  }
  error -= DLseOf(a, *task.gradients, task.sequence, id);
  const auto share = static_cast<float>(std::max(1.25 * UnitRoundoff(p.dtype), 0x1p-14));
  const float most = error / share;
  const auto exceeds = [](float size, float allowed) {
    return size * size > allowed && allowed > 0x1p-120f;
  };
  RowError found{error, false, exceeds(most, square)};
  if (d_q != nullptr) {
    found.of_queries = exceeds(most * norm, DotRows(d_q, d_q, PaddedDim(p.dim)));
  }
  return found;
}

bool StoreQueryGradients(const GradientTask& task, const PartialQueries& parts, int64_t first,
                         int64_t count, RowError* errors) {
  const Problem& p = task.attention->problem;
  const TensorView& to = task.gradients->d_q;
  HWY_ALIGN float sum[PaddedDim(kHeadDimMax)];
  bool finite = true;
  for (int64_t n = first; n < first + count; ++n) {
    const int64_t row = task.RowAt(n);
    const bool wanted = to.data != nullptr;
    if (wanted) SumParts(parts, row, PaddedDim(p.dim), sum);
    if (errors != nullptr) errors[row] = ErrorOf(task, parts, row, wanted ? sum : nullptr);
    if (!wanted) continue;
    finite = finite && AllFinite(sum, p.dim);
    const int64_t h = task.head + row / task.rows;
    const int64_t i = task.row + row % task.rows;
    NarrowRow(sum, p.scale, p.dim, p.dtype, to.data,
              RowElement(task.sequence, task.b, h, i, to.stride_b, to.stride_h, to.stride_l));
  }
  return finite;
}

// Stores dK or dV.
HWY_INLINE bool StoreKeySums(const GradientTask& task, const float* sums, const TensorView& to,
                             int64_t dim, float factor, float* rows) {
  const Problem& p = task.attention->problem;
  const int64_t h_kv = task.head / p.group();
  bool finite = true;
  for (int64_t tile = task.keys.begin; tile < task.keys.end; tile += kGradientKeys) {
    const int64_t keys = std::min(kGradientKeys, task.keys.end - tile);
    for (int64_t n = 0; n < CountPanels(keys, task.amx); ++n) {
      const LanePanel panel = PanelOf(keys, n, task.amx);
      const float* const from = sums + (tile - task.keys.begin + panel.lane) * PaddedDim(dim);
      for (int64_t at = 0; at < panel.width(); at += kTurned) {
        TurnOut(from + at, panel.width(), dim, kRowStride, rows);
        for (int64_t r = 0; r < std::min(kTurned, keys - panel.lane - at); ++r) {
          const int64_t row = task.sequence.k_row + tile + panel.lane + at + r;
          finite = finite && AllFinite(rows + r * kRowStride, dim);
          NarrowRow(rows + r * kRowStride, factor, dim, p.dtype, to.data,
                    task.b * to.stride_b + h_kv * to.stride_h + row * to.stride_l);
        }
      }
    }
  }
  return finite;
}

bool StoreKeyGradients(const GradientTask& task, GradientScratch* scratch) {
  const Problem& p = task.attention->problem;
  const Gradients& g = *task.gradients;
  float* const rows = scratch->rows;
  const bool k = task.d_k == nullptr || StoreKeySums(task, task.d_k, g.d_k, p.dim, p.scale, rows);
  const float kept = DropoutScale(p.dropout);
  const bool v = task.d_v == nullptr || StoreKeySums(task, task.d_v, g.d_v, p.dim_v, kept, rows);
  return k && v;
}

double SumSinkGradient(const Attention& a, const Gradients& g, const RowTerms* measured, int64_t h,
                       const StopFlag* stop) {
  const Problem& p = a.problem;
  HWY_ALIGN float q[kHeadDimMax];
  HWY_ALIGN float d_o[kHeadDimMax];
  HWY_ALIGN float row[kHeadDimMax];
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t i = 0; i < s.q_len && !Stopped(stop); ++i) {
      const RowId id{b, h, i};
      LoadQuery(a, g, s, id, q, d_o);
      const RowTerms terms = FindTerms(a, g, measured, s, id, q, d_o, row);
      double part = -SinkWeight(a, measured, s, id) * static_cast<double>(terms.less);
      // Inf of V is in O as it is in dP; other specials may differ there.
      const bool known = std::isfinite(part) || (terms.special && !std::isnan(part));
      if (!known && !std::isnan(sum)) ReferenceKeyGradients(a, g, id, &part, stop);
      sum += part;
    }
  }
  return sum;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
