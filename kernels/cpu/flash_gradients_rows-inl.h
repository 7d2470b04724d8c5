// SPDX-License-Identifier: Apache-2.0
//
// What the backward pass does with rows beside its products: delta, and rows of gradients on their
// way out. Included once per instruction set by flash_gradients_tile.cc.

#if defined(ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_
#undef ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_
#else
#define ATTEND_CPU_FLASH_GRADIENTS_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/flash_gradients_tile.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/reference/reference_gradients.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// Neighbouring vectors among `vectors`, divided evenly.
struct LanePanel {
  int64_t lane = 0;
  int vectors = 0;
  int64_t width() const { return vectors * kLanes; }
};

HWY_INLINE int64_t CountVectors(int64_t lanes) { return (lanes + kLanes - 1) / kLanes; }
HWY_INLINE int64_t CountPanels(int64_t lanes) {
  return (CountVectors(lanes) + kPanelVectors - 1) / kPanelVectors;
}
HWY_INLINE LanePanel PanelOf(int64_t lanes, int64_t n) {
  const int64_t vectors = CountVectors(lanes);
  const int64_t count = CountPanels(lanes);
  const int64_t first = n * vectors / count;
  return {first * kLanes, static_cast<int>((n + 1) * vectors / count - first)};
}

HWY_INLINE int64_t RowElement(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t stride_b,
                              int64_t stride_h, int64_t stride_l) {
  return b * stride_b + h * stride_h + (s.q_row + i) * stride_l;
}

// delta - dLSE of one row, from its dO as fp32.
HWY_INLINE float LessOf(const Attention& a, const Gradients& g, const Sequence& s, const RowId& id,
                        const float* d_o, float* row) {
  const Problem& p = a.problem;
  const F32 d;
  WidenRow(a.o.data, p.o_dtype(),
           RowElement(s, id.b, id.h, id.i, a.o.stride_b, a.o.stride_h, a.o.stride_l), p.dim_v, row);
  V32 sum = hn::Zero(d);
  int64_t n = 0;
  for (; n + kLanes <= p.dim_v; n += kLanes) {
    sum = hn::MulAdd(hn::LoadU(d, d_o + n), hn::LoadU(d, row + n), sum);
  }
  float delta = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; n < p.dim_v; ++n) delta += d_o[n] * row[n];
  const int64_t lse = RowElement(s, id.b, id.h, id.i, a.lse_stride_b, a.lse_stride_h, 1);
  return g.d_lse == nullptr ? delta : delta - g.d_lse[lse];
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

bool StoreQueryGradients(const GradientTask& task, const PartialQueries& parts, int64_t first,
                         int64_t count) {
  const Problem& p = task.attention->problem;
  const TensorView& to = task.gradients->d_q;
  const F32 d;
  const int64_t width = PaddedDim(p.dim);
  HWY_ALIGN float sum[PaddedDim(kHeadDimMax)];
  bool finite = true;
  for (int64_t row = first; row < first + count; ++row) {
    std::fill_n(sum, width, 0.0f);
    for (int64_t n = 0; n < parts.count; ++n) {
      if (parts.computed[n] == 0) continue;
      const float* const part = parts.first + n * parts.stride + row * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        hn::Store(hn::Add(hn::Load(d, sum + i), hn::Load(d, part + i)), d, sum + i);
      }
    }
    finite = finite && AllFinite(sum, p.dim);
    const int64_t h = task.head + row / task.rows;
    const int64_t i = task.row + row % task.rows;
    NarrowRow(sum, p.scale, p.dim, p.dtype, to.data,
              RowElement(task.sequence, task.b, h, i, to.stride_b, to.stride_h, to.stride_l));
  }
  return finite;
}

// One of dK and dV.
HWY_INLINE bool StoreKeySums(const GradientTask& task, const float* sums, const TensorView& to,
                             int64_t dim, float factor, float* rows) {
  const Problem& p = task.attention->problem;
  const int64_t h_kv = task.head / p.group();
  bool finite = true;
  for (int64_t tile = task.keys.begin; tile < task.keys.end; tile += kGradientKeys) {
    const int64_t keys = std::min(kGradientKeys, task.keys.end - tile);
    for (int64_t n = 0; n < CountPanels(keys); ++n) {
      const LanePanel panel = PanelOf(keys, n);
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

double SumSinkGradient(const Attention& a, const Gradients& g, int64_t h, const StopFlag* stop) {
  const Problem& p = a.problem;
  const double sink = static_cast<double>(a.sinks[h]);
  HWY_ALIGN float d_o[kHeadDimMax];
  HWY_ALIGN float row[kHeadDimMax];
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t i = 0; i < s.q_len && !Stopped(stop); ++i) {
      const RowId id{b, h, i};
      WidenRow(g.d_o.data, p.o_dtype(),
               RowElement(s, b, h, i, g.d_o.stride_b, g.d_o.stride_h, g.d_o.stride_l), p.dim_v,
               d_o);
      const float less = LessOf(a, g, s, id, d_o, row);
      const float lse = a.lse[RowElement(s, b, h, i, a.lse_stride_b, a.lse_stride_h, 1)];
      double part = -std::exp(sink - static_cast<double>(lse)) * static_cast<double>(less);
      if (!std::isfinite(part)) ReferenceKeyGradients(a, g, id, &part, stop);
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
