// SPDX-License-Identifier: Apache-2.0
//
// What one query row does to one key in the backward pass, given O and LSE, in double, with how far
// off each number may be in fp32: the quantities of check_gradients.h. Host memory; calling thread.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <utility>

#include "kernels/contract/gradients.h"
#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/reference/score_rounding.h"

namespace attend {

using RowElements = std::array<double, kHeadDimMax>;

// What a sum of so many products in fp32 is off by, relative to the sum of their magnitudes.
double SumRoundings(int64_t terms);
// And beside that, as the roundings of subnormal numbers are not relative to them.
double SubnormalRoundings(int64_t terms);

// A query row.
struct GradientRow {
  RowId id;
  Sequence sequence;
  RowElements q, d_o;
  double lse = 0;
  double lse_error = 0;
  double less = 0;  // delta - dLSE
  double less_error = 0;
};

// A key and its value.
struct GradientKey {
  int64_t j = 0;
  RowElements k, v;
};

struct GradientPair {
  double factor = 0;  // of dO in dV: P, times dropout's factor
  double factor_error = 0;
  double d_score = 0;  // dS
  double d_score_error = 0;
  double d_dot = 0;  // dT * scale
  double d_dot_error = 0;
};

// Not thread-safe: remembers what it has found out about K.
class GradientTerms {
 public:
  // Both must stay.
  GradientTerms(const Attention& attention, const Gradients& gradients);

  GradientRow Row(const RowId& id);
  GradientKey Key(int64_t b, int64_t kv_head, int64_t j) const;
  // All zero if the key has no weight, by its score. It must be visible.
  GradientPair Pair(const GradientRow& row, const GradientKey& key) const;

 private:
  double LargestKey(int64_t b, int64_t kv_head);

  const Attention& a_;
  const Gradients& g_;
  std::map<std::pair<int64_t, int64_t>, double> largest_;  // |k| by sequence and KV head, if known
};

}  // namespace attend
