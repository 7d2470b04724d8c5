// SPDX-License-Identifier: Apache-2.0
//
// Dropout (dropout.h) in the reference: weight by weight, in double.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend {

// Factor of a kept weight.
inline double KeptFactor(const Problem& p) {
  return static_cast<double>(kDropoutOne) / static_cast<double>(kDropoutOne - p.dropout);
}

// m_ij: the factor of the weight of a row and key j. 1 without dropout.
inline double DropoutFactor(const Attention& a, const RowId& id, int64_t j) {
  const Problem& p = a.problem;
  if (p.dropout == 0) return 1;
  const DropoutPlace& place = a.dropout;
  const bool keeps = DropoutKeeps(p.dropout, place.seed, place.sequence + id.b, place.head + id.h,
                                  place.row + id.i, p.key_offset + j);
  return keeps ? KeptFactor(p) : 0;
}

// Loads the value of key j, from `element` of V on, times DropoutFactor, and returns that factor.
// If the weight is dropped v is 0, even if the value is NaN or Inf.
inline double LoadKeptValue(const Attention& a, const RowId& id, int64_t j, int64_t element,
                            double* v) {
  const Problem& p = a.problem;
  const double factor = DropoutFactor(a, id, j);
  LoadElements(a.v.data, p.dtype, element, p.dim_v, v);
  if (p.dropout == 0) return factor;
  for (int64_t d = 0; d < p.dim_v; ++d) v[d] = factor == 0 ? 0 : v[d] * factor;
  return factor;
}

}  // namespace attend
