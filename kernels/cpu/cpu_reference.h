// SPDX-License-Identifier: Apache-2.0
//
// Rung 0: the definition of the answer, in plain loops and double precision. Pure functions of
// host memory on the calling thread; they may allocate.

#pragma once

#include <array>
#include <cstdint>

#include "kernels/limits.h"
#include "kernels/problem.h"

namespace attend {

// What rounding errors of one row are relative to; see check_rows.h.
struct RowMagnitudes {
  // Over the keys with weight: the largest scale * sum |q||k| + |bias| + |slope * distance|.
  double score = 0;
  // Per output element, over the same keys: the weighted mean of |v|, and the plain sum of |v|.
  std::array<double, kHeadDimMax> o{};
  std::array<double, kHeadDimMax> v{};
};

// One output row, sequence b, query head h, query row i < q_rows of the sequence, from host memory.
// Writes o[Dv] (unrounded) and *lse. Padding rows (i >= q_len) and rows without a key of any weight
// give 0 and -inf; with a sink the latter's LSE is the sink's logit, which is in the denominator
// still. A key whose score is -inf, from bias or from arithmetic, has no weight: its V is not read.
void ReferenceRow(const Attention& attention, int64_t b, int64_t h, int64_t i, double* o,
                  double* lse, RowMagnitudes* magnitudes = nullptr);

// ReferenceRow, rounded once and stored in attention.o and attention.lse.
void StoreReferenceRow(const Attention& attention, int64_t b, int64_t h, int64_t i);

// The whole problem on the calling thread.
void CpuReference(const Attention& attention);

}  // namespace attend
