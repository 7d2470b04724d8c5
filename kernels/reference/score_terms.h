// SPDX-License-Identifier: Apache-2.0
//
// One score of one query row and key, in double precision and term by term.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend {

// The terms of one score (problem.h), in double.
struct ScoreTerms {
  double dot = 0;        // q.k
  double magnitude = 0;  // sum |q||k|
  double capped = 0;     // scale * q.k, capped
  double bias = 0;
  double penalty = 0;  // slope * distance
};

// The terms for query row id.i of sequence `s` and key j, whose elements are q[D] and k[D]. If a
// bit removes the key, its bias is -inf and the other terms are 0, even if K is NaN.
ScoreTerms TermsOf(const Attention& attention, const Sequence& s, const RowId& id, int64_t j,
                   const double* q, const double* k);

}  // namespace attend
