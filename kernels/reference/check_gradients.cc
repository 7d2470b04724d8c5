// SPDX-License-Identifier: Apache-2.0

#include "kernels/reference/check_gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/gradient_terms.h"

namespace attend {
namespace {

constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Of a pair beside its products, in multiply-adds: two exponentials and their like.
constexpr double kPairWork = 128;
// However cheap rows are, no more of one gradient are judged.
constexpr int64_t kRowsMost = 1 << 16;

// Half a step between the dtype's subnormal numbers.
double SubnormalRounding(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : dtype == DType::kBFloat16 ? 0x1p-134 : 0x1p-149;
}

double Overflow(DType dtype) {
  return dtype == DType::kFloat16 ? 65520 : dtype == DType::kBFloat16 ? 0x1.ffp127 : 0x1.ffffffp127;
}

// A row of a gradient while it is added up.
class RowSums {
 public:
  // Once the sums are rounded they may be multiplied with `factor`.
  explicit RowSums(int64_t dim, double factor = 1)
      : dim_(static_cast<size_t>(dim)), factor_(std::max(1.0, factor)) {}

  void Add(const RowElements& by, double factor, double error) {
    ++terms_;
    for (size_t d = 0; d < dim_; ++d) {
      value_[d] += factor * by[d];
      magnitude_[d] += std::abs(factor * by[d]);
      error_[d] += error * std::abs(by[d]);
    }
  }
  void AddOne(double value, double error) {
    ++terms_;
    value_[0] += value;
    magnitude_[0] += std::abs(value);
    error_[0] += error;
  }

  size_t dim() const { return dim_; }
  double value(size_t d) const { return value_[d]; }
  // The bound of an element, its rounding to `dtype` included.
  double Bound(size_t d, DType dtype) const {
    double bound = error_[d] + SumRoundings(terms_) * magnitude_[d];
    // What is off before it is rounded is rounded too.
    bound += kRoundoff * (std::abs(value_[d]) + bound);
    if (value_[d] == 0 && bound == 0) return 0;
    bound += factor_ * SubnormalRoundings(terms_);
    return bound + UnitRoundoff(dtype) * (std::abs(value_[d]) + bound) + SubnormalRounding(dtype);
  }

 private:
  const size_t dim_;
  const double factor_;
  int64_t terms_ = 0;
  std::array<double, kHeadDimMax> value_{}, error_{}, magnitude_{};
};

class Judge {
 public:
  Judge(const Attention& a, const Gradients& g, uint64_t seed, const StopFlag* stop)
      : a_(a), g_(g), p_(a.problem), terms_(a, g), random_(seed), stop_(stop) {}

  RowsReport Run(uint64_t seed, double work_budget);

 private:
  // Rows of a gradient, numbered by sequence, head and row.
  struct Rows {
    const char* name;
    TensorView view;
    bool keys;
    int64_t heads;
    int64_t dim;
  };
  struct Place {
    int64_t b = 0, h = 0, row = 0;
  };

  int64_t Count(const Rows& rows) const { return Before(rows, p_.batch); }
  int64_t Before(const Rows& rows, int64_t b) const;
  Place PlaceOf(const Rows& rows, int64_t n) const;
  int64_t ElementOf(const Rows& rows, const Place& place) const;
  bool IsFinite(const Rows& rows, const Place& place) const;

  // Calls judge(n) for the rows to be judged, as the header says; `row_work` of each.
  template <class Body>
  void ForSample(int64_t total, double budget, double row_work, const std::vector<int64_t>& first,
                 const Body& judge);
  void CheckRowsOf(const Rows& rows, double budget);
  void CheckQuery(const Rows& rows, const Place& place);
  void CheckKey(const Rows& rows, const Place& place);
  void CheckBias(double budget);
  void CheckSinks(double budget);
  void See(const char* name, const Place& place, const RowSums& truth, const void* data,
           DType dtype, int64_t at);

  const Attention& a_;
  const Gradients& g_;
  const Problem& p_;
  GradientTerms terms_;
  std::mt19937_64 random_;
  const StopFlag* const stop_;
  RowsReport report_;
  double worst_ = 0;  // of an element, in bounds
  double error_sum_ = 0;
  int64_t elements_ = 0;
};

int64_t Judge::Before(const Rows& rows, int64_t b) const {
  if (!p_.packed) return b * rows.heads * (rows.keys ? p_.len_k : p_.len_q);
  const int64_t* const offsets = rows.keys ? a_.kv_offsets : a_.q_offsets;
  return (offsets[b] - offsets[0]) * rows.heads;
}

Judge::Place Judge::PlaceOf(const Rows& rows, int64_t n) const {
  // The last sequence that begins at n or before.
  int64_t b = 0;
  for (int64_t end = p_.batch; end - b > 1;) {
    const int64_t middle = b + (end - b) / 2;
    (Before(rows, middle) <= n ? b : end) = middle;
  }
  const int64_t length = (Before(rows, b + 1) - Before(rows, b)) / rows.heads;
  const int64_t within = n - Before(rows, b);
  return {b, within / length, within % length};
}

int64_t Judge::ElementOf(const Rows& rows, const Place& place) const {
  const Sequence s = SequenceOf(a_, place.b);
  return place.b * rows.view.stride_b + place.h * rows.view.stride_h +
         ((rows.keys ? s.k_row : s.q_row) + place.row) * rows.view.stride_l;
}

bool Judge::IsFinite(const Rows& rows, const Place& place) const {
  RowElements values;
  LoadElements(rows.view.data, p_.dtype, ElementOf(rows, place), rows.dim, values.data());
  return std::all_of(values.begin(), values.begin() + rows.dim,
                     [](double value) { return std::isfinite(value); });
}

template <class Body>
void Judge::ForSample(int64_t total, double budget, double row_work,
                      const std::vector<int64_t>& first, const Body& judge) {
  report_.rows_total += total;
  if (total == 0) return;
  const auto most = static_cast<double>(std::min(total, kRowsMost));
  const auto count = static_cast<int64_t>(std::clamp(budget / row_work, 1.0, most));
  const auto begun = std::min(count, static_cast<int64_t>(first.size()));
  for (int64_t n = 0; n < begun && !Stopped(stop_); ++n) judge(first[static_cast<size_t>(n)]);
  const int64_t shares = count == total ? total : count - begun;
  const double share =
      static_cast<double>(total) / static_cast<double>(std::max<int64_t>(1, shares));
  for (int64_t n = 0; n < shares && !Stopped(stop_); ++n) {
    const auto begin = static_cast<int64_t>(static_cast<double>(n) * share);
    const auto end = std::max(begin + 1, static_cast<int64_t>(static_cast<double>(n + 1) * share));
    const int64_t drawn = std::uniform_int_distribution<int64_t>(begin, end - 1)(random_);
    if (!std::binary_search(first.begin(), first.begin() + begun, drawn)) judge(drawn);
  }
}

void Judge::See(const char* name, const Place& place, const RowSums& truth, const void* data,
                DType dtype, int64_t at) {
  for (size_t d = 0; d < truth.dim(); ++d) {
    const double value = truth.value(d);
    const double bound = truth.Bound(d, dtype);
    if (!std::isfinite(value) || std::isnan(bound)) continue;
    const auto got = static_cast<double>(LoadElement(data, dtype, at + static_cast<int64_t>(d)));
    if (std::isinf(got) && std::abs(value) + bound >= Overflow(dtype)) continue;
    const double error = std::isfinite(got) ? std::abs(got - value) : kInfinity;
    if (std::isfinite(error)) {
      error_sum_ += error;
      ++elements_;
    }
    if (error >= report_.max_abs_error) {
      report_.max_abs_error = error;
      report_.bound = bound;
    }
    if (error <= bound) continue;
    report_.ok = false;
    const double ratio = bound > 0 ? error / bound : kInfinity;
    if (ratio <= worst_ && !report_.detail.empty()) continue;
    worst_ = ratio;
    report_.detail = std::string(name) + " of sequence " + std::to_string(place.b) + ", head " +
                     std::to_string(place.h) + ", row " + std::to_string(place.row) + ", element " +
                     std::to_string(d) + " is " + std::to_string(got) + ", must be " +
                     std::to_string(value) + ": off by " + std::to_string(ratio) + " bounds";
  }
  ++report_.rows_checked;
}

void Judge::CheckQuery(const Rows& rows, const Place& place) {
  RowSums sums(p_.dim, std::abs(static_cast<double>(p_.scale)));
  const Sequence s = SequenceOf(a_, place.b);
  if (place.row < s.q_len) {
    const GradientRow row = terms_.Row({place.b, place.h, place.row});
    const KeyRange keys = VisibleKeys(p_.mask, s, place.row);
    for (int64_t j = keys.begin; j < keys.end && !Stopped(stop_); ++j) {
      const GradientKey key = terms_.Key(place.b, place.h / p_.group(), j);
      const GradientPair pair = terms_.Pair(row, key);
      sums.Add(key.k, pair.d_dot, pair.d_dot_error);
    }
  }
  See(rows.name, place, sums, rows.view.data, p_.dtype, ElementOf(rows, place));
}

// Of dK or dV.
void Judge::CheckKey(const Rows& rows, const Place& place) {
  const bool of_k = rows.view.data == g_.d_k.data;
  RowSums sums(rows.dim, of_k ? std::abs(static_cast<double>(p_.scale)) : KeptFactor(p_));
  const Sequence s = SequenceOf(a_, place.b);
  if (place.row < s.k_len) {
    const GradientKey key = terms_.Key(place.b, place.h, place.row);
    for (int64_t h = place.h * p_.group(); h < (place.h + 1) * p_.group(); ++h) {
      for (int64_t i = 0; i < s.q_len && !Stopped(stop_); ++i) {
        const KeyRange keys = VisibleKeys(p_.mask, s, i);
        if (place.row < keys.begin || place.row >= keys.end) continue;
        const GradientRow row = terms_.Row({place.b, h, i});
        const GradientPair pair = terms_.Pair(row, key);
        if (of_k) {
          sums.Add(row.q, pair.d_dot, pair.d_dot_error);
        } else {
          sums.Add(row.d_o, pair.factor, pair.factor_error);
        }
      }
    }
  }
  See(rows.name, place, sums, rows.view.data, p_.dtype, ElementOf(rows, place));
}

void Judge::CheckRowsOf(const Rows& rows, double budget) {
  if (rows.view.data == nullptr) return;
  const auto pair = static_cast<double>(2 * (p_.dim + p_.dim_v)) + kPairWork;
  const int64_t pairs = rows.keys ? p_.group() * p_.len_q : p_.len_k;
  const int64_t total = Count(rows);
  std::vector<int64_t> suspicious;
  for (int64_t n = 0; n < total && std::ssize(suspicious) < kRowsMost && !Stopped(stop_); ++n) {
    if (!IsFinite(rows, PlaceOf(rows, n))) suspicious.push_back(n);
  }
  const double work = pair * static_cast<double>(std::max<int64_t>(1, pairs));
  ForSample(total, budget, work, suspicious, [&](int64_t n) {
    const Place place = PlaceOf(rows, n);
    rows.keys ? CheckKey(rows, place) : CheckQuery(rows, place);
  });
}

// Element by element: each takes all that the bias was broadcast to.
void Judge::CheckBias(double budget) {
  const TensorView& to = g_.d_bias;
  if (to.data == nullptr) return;
  const auto extent = [](int64_t stride, int64_t count) { return stride == 0 ? 1 : count; };
  const int64_t batch = extent(to.stride_b, p_.batch), heads = extent(to.stride_h, p_.heads_q),
                rows = extent(to.stride_l, p_.len_q);
  const auto broadcast = static_cast<double>(p_.batch * p_.heads_q * p_.len_q) /
                         static_cast<double>(std::max<int64_t>(1, batch * heads * rows));
  const double work = broadcast * (static_cast<double>(2 * (p_.dim + p_.dim_v)) + kPairWork);
  ForSample(batch * heads * rows * p_.len_k, budget, std::max(1.0, work), {}, [&](int64_t n) {
    const int64_t j = n % p_.len_k, i0 = n / p_.len_k % rows, h0 = n / p_.len_k / rows % heads,
                  b0 = n / p_.len_k / rows / heads;
    RowSums sums(1);
    const auto all = [](int64_t stride, int64_t at, int64_t count, const auto& visit) {
      const int64_t begin = stride == 0 ? 0 : at, end = stride == 0 ? count : at + 1;
      for (int64_t each = begin; each < end; ++each) visit(each);
    };
    all(to.stride_b, b0, p_.batch, [&](int64_t b) {
      const Sequence s = SequenceOf(a_, b);
      if (j >= s.k_len) return;
      all(to.stride_h, h0, p_.heads_q, [&](int64_t h) {
        const GradientKey key = terms_.Key(b, h / p_.group(), j);
        all(to.stride_l, i0, p_.len_q, [&](int64_t i) {
          const KeyRange keys = VisibleKeys(p_.mask, s, i);
          if (i >= s.q_len || j < keys.begin || j >= keys.end || Stopped(stop_)) return;
          const GradientPair pair = terms_.Pair(terms_.Row({b, h, i}), key);
          sums.AddOne(pair.d_score, pair.d_score_error);
        });
      });
    });
    const int64_t at = b0 * to.stride_b + h0 * to.stride_h + i0 * to.stride_l + j;
    See("d_bias", {b0, h0, i0}, sums, to.data, DType::kFloat32, at);
  });
}

void Judge::CheckSinks(double budget) {
  if (g_.d_sinks == nullptr) return;
  const int64_t rows = p_.packed ? p_.total_q : p_.batch * p_.len_q;
  const double work =
      static_cast<double>(std::max<int64_t>(1, rows)) * static_cast<double>(p_.dim + p_.dim_v + 64);
  ForSample(p_.heads_q, budget, work, {}, [&](int64_t h) {
    RowSums sums(1);
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t length = SequenceOf(a_, b).q_len;
      for (int64_t i = 0; i < length && !Stopped(stop_); ++i) {
        const GradientRow row = terms_.Row({b, h, i});
        const double weight = std::exp(static_cast<double>(a_.sinks[h]) - row.lse);
        const double weight_error = weight * (std::expm1(row.lse_error) + 4 * kRoundoff);
        sums.AddOne(-weight * row.less,
                    weight_error * std::abs(row.less) + (weight + weight_error) * row.less_error);
      }
    }
    See("d_sinks", {0, h, 0}, sums, g_.d_sinks, DType::kFloat32, h);
  });
}

RowsReport Judge::Run(uint64_t seed, double work_budget) {
  const double share = work_budget / 6;
  // Before anything is made of them.
  const RowsReport forward = CheckRows(a_, SampleRows(a_, seed, share, stop_), stop_);
  CheckRowsOf({"d_q", g_.d_q, false, p_.heads_q, p_.dim}, share);
  CheckRowsOf({"d_k", g_.d_k, true, p_.heads_kv, p_.dim}, share);
  CheckRowsOf({"d_v", g_.d_v, true, p_.heads_kv, p_.dim_v}, share);
  CheckBias(share);
  CheckSinks(share);
  report_.mean_abs_error = elements_ == 0 ? 0 : error_sum_ / static_cast<double>(elements_);
  if (forward.ok) return report_;
  report_.ok = false;
  report_.of_inputs = true;
  report_.detail = "O and LSE are not those of q, k and v: " + forward.detail;
  return report_;
}

}  // namespace

RowsReport CheckGradients(const Attention& attention, const Gradients& gradients, uint64_t seed,
                          double work_budget, const StopFlag* stop) {
  return Judge(attention, gradients, seed, stop).Run(seed, work_budget);
}

}  // namespace attend
