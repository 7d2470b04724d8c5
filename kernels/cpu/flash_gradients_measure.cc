// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/flash_gradients_measure.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/flash_gradients_plan.h"
#include "kernels/cpu/parallel.h"

namespace attend::cpu_flash {
namespace {

// Most rows of one task, which packs all keys for them.
constexpr size_t kRowsMost = 4 * kGradientRows;

// Some rows of a KV head.
struct Listed {
  int64_t b;
  int64_t h_kv;
  std::vector<int32_t> rows;
};

// Lists the rows to measure and initialises their terms to empty sums.
std::vector<Listed> FindRows(const Attention& a, const StopFlag* stop,
                             std::vector<RowTerms>* terms) {
  const Problem& p = a.problem;
  std::vector<Listed> found;
  const int64_t rows = p.packed ? p.total_q : p.batch * p.len_q;
  for (int64_t n = 0; n < p.batch * p.heads_q && !Stopped(stop); ++n) {
    const int64_t b = n / p.heads_q, h = n % p.heads_q, h_kv = h / p.group();
    const Sequence s = SequenceOf(a, b);
    const float* const lse = a.lse + b * a.lse_stride_b + h * a.lse_stride_h + s.q_row;
    for (int64_t i = 0; i < s.q_len && s.k_len > 0; ++i) {
      const float size = std::abs(lse[i]);
      if (!(size > kLargeLse) || std::isinf(size)) continue;
      if (found.empty() || found.back().b != b || found.back().h_kv != h_kv ||
          found.back().rows.size() == kRowsMost) {
        found.push_back({b, h_kv, {}});
      }
      if (terms->empty()) terms->resize(static_cast<size_t>(p.heads_q * rows));
      (*terms)[static_cast<size_t>(TermsIndex(p, s, {b, h, i}))] = {
          .shift = -std::numeric_limits<float>::infinity(), .known = true};
      found.back().rows.push_back(static_cast<int32_t>(h % p.group() * s.q_len + i));
    }
  }
  return found;
}

}  // namespace

std::vector<RowTerms> MeasureRows(const Attention& attention, const Gradients& gradients,
                                  const GradientFunctions& functions, const StopFlag* stop) {
  std::vector<RowTerms> terms;
  const std::vector<Listed> found = FindRows(attention, stop, &terms);
  ParallelInOrder(
      std::ssize(found),
      [&](int64_t n) {
        const Listed& listed = found[static_cast<size_t>(n)];
        GradientTask task = WholeHead(attention, gradients, listed.b, listed.h_kv);
        task.step = GradientStep::kMeasure;
        task.listed = listed.rows.data();
        task.listed_count = std::ssize(listed.rows);
        task.measured = terms.data();
        task.stop = stop;
        functions.run(task, ThreadScratch());
      },
      stop);
  return terms;
}

}  // namespace attend::cpu_flash
