// SPDX-License-Identifier: Apache-2.0
//
// For each gradient a sample of rows is recomputed in double (CheckQuery, CheckKey, ...), every
// element as a GradientSums with its own bound, and compared by See. The work budget is split into
// shares, and a sample is stratified: one row drawn from each of equal shares of all rows, after
// the rows that contain NaN or Inf. Rows that fp32 itself leaves undetermined count as unjudged,
// never as passed.

#include "kernels/reference/check_gradients.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/reference/dropout_factor.h"
#include "kernels/reference/gradient_terms.h"
#include "kernels/reference/row_weights.h"
#include "kernels/reference/sum_of_weights.h"

namespace attend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Work budget for the O and LSE that a wrong gradient came from: some 0.1 s.
constexpr double kBlamedWork = 1 << 26;
// Upper bound of rows judged per gradient, however cheap they are.
constexpr int64_t kRowsMost = 1 << 16;
// Shares of the work budget: O and LSE 1, the rows' softmax 2, five gradients 1 each, the sums of
// dV 1.
constexpr double kShares = 9;

double Overflow(DType dtype) {
  return dtype == DType::kFloat16 ? 65520 : dtype == DType::kBFloat16 ? 0x1.ffp127 : 0x1.ffffffp127;
}

std::string Text(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", number);
  return text;
}

class Judge {
 public:
  Judge(const Attention& a, const Gradients& g, uint64_t seed, double work_budget,
        bool weights_rounded, const StopFlag* stop)
      : a_(a),
        g_(g),
        p_(a.problem),
        share_(work_budget / kShares),
        weights_rounded_(weights_rounded),
        rows_(a, g, 2 * share_, stop),
        random_(seed),
        stop_(stop) {}

  RowsReport Run(uint64_t seed);

 private:
  // Rows of one gradient, numbered by sequence, head and row.
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
  // The rows whose O and LSE a gradient depends on: one, or all of some sequences and KV heads.
  struct Inputs {
    AttentionSlice part;
    std::optional<RowId> row = {};
  };

  int64_t Count(const Rows& rows) const { return Before(rows, p_.batch); }
  int64_t Before(const Rows& rows, int64_t b) const;
  Place PlaceOf(const Rows& rows, int64_t n) const;
  int64_t ElementOf(const Rows& rows, const Place& place) const;
  bool IsFinite(const Rows& rows, const Place& place) const;

  // Calls judge(n) for the rows that the header says to judge; each costs `row_work`.
  template <class Body>
  void ForSample(int64_t total, double budget, double row_work, const std::vector<int64_t>& first,
                 const Body& judge);
  void CheckRowsOf(const Rows& rows);
  void CheckQuery(const Rows& rows, const Place& place);
  void CheckKey(const Rows& rows, const Place& place);
  void CheckSums();
  void CheckBias();
  void CheckSinks();
  GradientKey Key(int64_t b, int64_t kv_head, int64_t j) const;
  Inputs OfHead(int64_t b, int64_t kv_head) const {
    return {{b, b + 1, kv_head, kv_head + 1, 0, p_.len_q}};
  }
  Inputs OfAll() const { return {{0, p_.batch, 0, p_.heads_kv, 0, p_.len_q}}; }
  void See(const char* name, const Place& place, const Inputs& inputs, const GradientSums& truth,
           const void* data, DType dtype, int64_t at);
  void Blame(double ratio, const Inputs& inputs, const std::string& what);
  // Judges the O and LSE that the worst gradient depends on, within kBlamedWork.
  RowsReport CheckBlamed() const;

  const Attention& a_;
  const Gradients& g_;
  const Problem& p_;
  const double share_;  // work budget per gradient
  const bool weights_rounded_;
  GradientRows rows_;
  std::mt19937_64 random_;
  const StopFlag* const stop_;
  RowsReport report_;
  std::string unjudged_;  // the first unjudged row, and why
  double worst_ = 0;      // largest error of an element, relative to its bound
  Inputs blamed_;         // of this element
  double error_sum_ = 0;
  int64_t elements_ = 0;
};

int64_t Judge::Before(const Rows& rows, int64_t b) const {
  if (!p_.packed) return b * rows.heads * (rows.keys ? p_.len_k : p_.len_q);
  const int64_t* const offsets = rows.keys ? a_.kv_offsets : a_.q_offsets;
  return (offsets[b] - offsets[0]) * rows.heads;
}

Judge::Place Judge::PlaceOf(const Rows& rows, int64_t n) const {
  // Binary search for the last sequence that begins at or before n.
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

GradientKey Judge::Key(int64_t b, int64_t kv_head, int64_t j) const {
  GradientKey key{.j = j, .k = {}, .v = {}};
  const int64_t at = SequenceOf(a_, b).k_row + j;
  LoadRow(a_.k, p_.dtype, p_.dim, b, kv_head, at, &key.k);
  LoadRow(a_.v, p_.dtype, p_.dim_v, b, kv_head, at, &key.v);
  return key;
}

RowsReport Judge::CheckBlamed() const {
  if (blamed_.row) return CheckRows(a_, {{*blamed_.row}}, stop_);
  const Result<Attention> part = TakeSlice(a_, blamed_.part);
  const Attention& of = part.ok() ? *part : a_;
  return CheckRows(of, SampleRows(of, 0, kBlamedWork, stop_), stop_);
}

void Judge::Blame(double ratio, const Inputs& inputs, const std::string& what) {
  report_.ok = false;
  if (ratio <= worst_ && !report_.detail.empty()) return;
  worst_ = ratio;
  blamed_ = inputs;
  report_.detail = what + ": off by " + Text(ratio) + " bounds";
}

void Judge::See(const char* name, const Place& place, const Inputs& inputs,
                const GradientSums& truth, const void* data, DType dtype, int64_t at) {
  const auto where = [&] {
    return std::string(name) + " of sequence " + std::to_string(place.b) + ", head " +
           std::to_string(place.h) + ", row " + std::to_string(place.row);
  };
  // Why the row cannot be judged; null if it can.
  const char* open = truth.given()     ? "the LSE that came with its rows leaves their weights open"
                     : truth.unknown() ? "its scores may leave fp32's range"
                     : truth.Open(dtype) ? "fp32 leaves its weights open"
                                         : nullptr;
  for (size_t d = 0; d < truth.dim(); ++d) {
    const double value = truth.value(d);
    const double bound = truth.Bound(d, dtype);
    const auto got = static_cast<double>(LoadElement(data, dtype, at + static_cast<int64_t>(d)));
    if (!std::isfinite(value) || !std::isfinite(bound)) {
      // A non-finite value is right wherever the truth is not finite.
      if (!std::isfinite(value) && !std::isfinite(got)) continue;
      if (truth.special(d) && !truth.unknown()) {
        Blame(kInfinity, inputs,
              where() + ", element " + std::to_string(d) + " is " + Text(got) + ", must be " +
                  Text(value));
      } else if (open == nullptr) {
        open = "fp32 may not see the NaN or Inf that is in it";
      }
      continue;
    }
    if (std::isinf(got) && std::abs(value) + bound >= Overflow(dtype)) continue;
    if (truth.unknown()) continue;
    if (!std::isfinite(got) && truth.MayOverflow(d)) {
      if (open == nullptr) open = "its sums may leave fp32's range";
      continue;
    }
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
    Blame(bound > 0 ? error / bound : kInfinity, inputs,
          where() + ", element " + std::to_string(d) + " is " + Text(got) + ", must be " +
              Text(value));
  }
  ++report_.rows_checked;
  if (truth.Wide()) ++report_.rows_wide;
  if (open != nullptr && report_.rows_unjudged++ == 0) unjudged_ = where() + ": " + open;
}

void Judge::CheckQuery(const Rows& rows, const Place& place) {
  GradientSums sums(p_.dim, std::abs(static_cast<double>(p_.scale)), true);
  if (place.row < SequenceOf(a_, place.b).q_len) {
    const GradientRow row = rows_.Row({place.b, place.h, place.row}, true);
    if (!row.weights.known) sums.AddUnknown(row.weights);
    const KeyRange keys = VisibleKeys(p_.mask, row.sequence, place.row);
    for (int64_t j = keys.begin; j < keys.end && !Stopped(stop_); ++j) {
      const GradientKey key = Key(place.b, place.h / p_.group(), j);
      const GradientPair pair = PairOf(a_, row, key, weights_rounded_);
      if (pair.counts) sums.Add(key.k, pair.d_dot);
    }
  }
  See(rows.name, place, {{}, RowId{place.b, place.h, place.row}}, sums, rows.view.data, p_.dtype,
      ElementOf(rows, place));
}

// A row of dK or dV.
void Judge::CheckKey(const Rows& rows, const Place& place) {
  const bool of_k = rows.view.data == g_.d_k.data;
  GradientSums sums(rows.dim, of_k ? std::abs(static_cast<double>(p_.scale)) : KeptFactor(p_),
                    false);
  const Sequence s = SequenceOf(a_, place.b);
  if (place.row < s.k_len) {
    const GradientKey key = Key(place.b, place.h, place.row);
    for (int64_t h = place.h * p_.group(); h < (place.h + 1) * p_.group(); ++h) {
      for (int64_t i = 0; i < s.q_len && !Stopped(stop_); ++i) {
        const KeyRange keys = VisibleKeys(p_.mask, s, i);
        if (place.row < keys.begin || place.row >= keys.end) continue;
        const GradientRow row = rows_.Row({place.b, h, i});
        if (!row.weights.known) sums.AddUnknown(row.weights);
        const GradientPair pair = PairOf(a_, row, key, weights_rounded_);
        if (pair.counts && of_k) sums.Add(row.q, pair.d_dot);
        if (pair.counts && !of_k && pair.kept) sums.Add(row.d_o, pair.factor);
      }
    }
  }
  See(rows.name, place, OfHead(place.b, place.h), sums, rows.view.data, p_.dtype,
      ElementOf(rows, place));
}

void Judge::CheckRowsOf(const Rows& rows) {
  if (rows.view.data == nullptr) return;
  const int64_t pairs = rows.keys ? p_.group() * p_.len_q : p_.len_k;
  const int64_t total = Count(rows);
  std::vector<int64_t> suspicious;
  for (int64_t n = 0; n < total && std::ssize(suspicious) < kRowsMost && !Stopped(stop_); ++n) {
    if (!IsFinite(rows, PlaceOf(rows, n))) suspicious.push_back(n);
  }
  const double work = rows_.PairWork() * static_cast<double>(std::max<int64_t>(1, pairs));
  ForSample(total, share_, work, suspicious, [&](int64_t n) {
    const Place place = PlaceOf(rows, n);
    rows.keys ? CheckKey(rows, place) : CheckQuery(rows, place);
  });
}

// Element by element: each sums over everything that the bias was broadcast to.
void Judge::CheckBias() {
  const TensorView& to = g_.d_bias;
  if (to.data == nullptr) return;
  const auto extent = [](int64_t stride, int64_t count) { return stride == 0 ? 1 : count; };
  const int64_t batch = extent(to.stride_b, p_.batch), heads = extent(to.stride_h, p_.heads_q),
                rows = extent(to.stride_l, p_.len_q);
  const auto broadcast = static_cast<double>(p_.batch * p_.heads_q * p_.len_q) /
                         static_cast<double>(std::max<int64_t>(1, batch * heads * rows));
  const double work = std::max(1.0, broadcast * rows_.PairWork());
  ForSample(batch * heads * rows * p_.len_k, share_, work, {}, [&](int64_t n) {
    const int64_t j = n % p_.len_k, i0 = n / p_.len_k % rows, h0 = n / p_.len_k / rows % heads,
                  b0 = n / p_.len_k / rows / heads;
    GradientSums sums(1, 1, false);
    const auto all = [](int64_t stride, int64_t at, int64_t count, const auto& visit) {
      const int64_t begin = stride == 0 ? 0 : at, end = stride == 0 ? count : at + 1;
      for (int64_t each = begin; each < end; ++each) visit(each);
    };
    all(to.stride_b, b0, p_.batch, [&](int64_t b) {
      const Sequence s = SequenceOf(a_, b);
      if (j >= s.k_len) return;
      all(to.stride_h, h0, p_.heads_q, [&](int64_t h) {
        const GradientKey key = Key(b, h / p_.group(), j);
        all(to.stride_l, i0, p_.len_q, [&](int64_t i) {
          const KeyRange keys = VisibleKeys(p_.mask, s, i);
          if (i >= s.q_len || j < keys.begin || j >= keys.end || Stopped(stop_)) return;
          const GradientRow row = rows_.Row({b, h, i});
          if (!row.weights.known) sums.AddUnknown(row.weights);
          const GradientPair pair = PairOf(a_, row, key, weights_rounded_);
          if (pair.counts) sums.AddOne(pair.d_score);
        });
      });
    });
    const int64_t at = b0 * to.stride_b + h0 * to.stride_h + i0 * to.stride_l + j;
    See("d_bias", {b0, h0, i0}, OfAll(), sums, to.data, DType::kFloat32, at);
  });
}

void Judge::CheckSinks() {
  if (g_.d_sinks == nullptr) return;
  const int64_t rows = p_.packed ? p_.total_q : p_.batch * p_.len_q;
  const double work = rows_.PairWork() * static_cast<double>(std::max<int64_t>(1, rows));
  ForSample(p_.heads_q, share_, work, {}, [&](int64_t h) {
    GradientSums sums(1, 1, false);
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t length = SequenceOf(a_, b).q_len;
      for (int64_t i = 0; i < length && !Stopped(stop_); ++i) {
        const RowWeights w = rows_.Row({b, h, i}).weights;
        if (!w.known) sums.AddUnknown(w);
        const double most = std::abs(w.less) + w.less_error + w.less_moved;
        sums.AddOne({.value = -w.sink * w.less,
                     .error = w.sink * w.less_error + SubnormalRoundings(p_.dim_v),
                     .moved = w.sink * w.less_moved + w.sink_error * most,
                     .swing = most,
                     .gross = w.sink * w.less_size});
      }
    }
    See("d_sinks", {0, h, 0}, OfAll(), sums, g_.d_sinks, DType::kFloat32, h);
  });
}

// Checks as many KV heads as the work allows, evenly spaced.
void Judge::CheckSums() {
  if (g_.d_v.data == nullptr) return;
  const double work = static_cast<double>(p_.dim + 3 * p_.dim_v) *
                      static_cast<double>(p_.len_k + p_.group() * p_.len_q + 1);
  const auto heads = static_cast<double>(p_.batch * p_.heads_kv);
  const double step = std::max(1.0, heads * work / share_);
  for (double n = 0; n < heads && !Stopped(stop_); n += step) {
    const auto head = static_cast<int64_t>(n);
    const int64_t b = head / p_.heads_kv, h = head % p_.heads_kv;
    const SumFault fault = FindSumFault(a_, g_, b, h, weights_rounded_, &rows_, stop_);
    if (!(fault.ratio > 1)) continue;
    Blame(fault.ratio, OfHead(b, h),
          "d_v of sequence " + std::to_string(b) + ", head " + std::to_string(h) + ", element " +
              std::to_string(fault.element) + " adds up to " + Text(fault.got) +
              " over the keys, must to " + Text(fault.want));
  }
}

RowsReport Judge::Run(uint64_t seed) {
  // First check O and LSE, which the gradients depend on; for a part of the keys they are the
  // whole's and cannot be checked here.
  const bool part = HasPart(p_);
  RowsReport forward =
      part ? RowsReport{} : CheckRows(a_, SampleRows(a_, seed, share_, stop_), stop_);
  CheckRowsOf({"d_q", g_.d_q, false, p_.heads_q, p_.dim});
  CheckRowsOf({"d_k", g_.d_k, true, p_.heads_kv, p_.dim});
  CheckRowsOf({"d_v", g_.d_v, true, p_.heads_kv, p_.dim_v});
  if (!part) CheckSums();
  CheckBias();
  CheckSinks();
  report_.mean_abs_error = elements_ == 0 ? 0 : error_sum_ / static_cast<double>(elements_);
  if (!report_.ok && forward.ok && !part) forward = CheckBlamed();
  if (!forward.ok) {
    report_.ok = false;
    report_.of_inputs = true;
    report_.detail = "O and LSE are not those of q, k and v: " + forward.detail;
  } else if (report_.ok && report_.rows_unjudged > 0) {
    report_.ok = false;
    report_.undecided = true;
    report_.detail = "cannot be judged: " + unjudged_;
  }
  return report_;
}

}  // namespace

RowsReport CheckGradients(const Attention& attention, const Gradients& gradients, uint64_t seed,
                          double work_budget, const StopFlag* stop, bool weights_rounded) {
  return Judge(attention, gradients, seed, work_budget, weights_rounded, stop).Run(seed);
}

}  // namespace attend
