// SPDX-License-Identifier: Apache-2.0
//
// Judges output rows against double precision, with a bound that is derived, not chosen:
//
//   bound = 2 * (error of a plain same-precision implementation on the same rows) + floor
//
// The plain implementation is standard attention in the problem's dtype (plain_row.h). The factor 2
// and the floor follow FlashAttention's tests (Dao-AILab, hopper/test_flash_attn.py). The floor is
// what rounding alone may cost: one rounding of O to its dtype, plus fp32's rounding of each score
// carried through exp.
//
// Rows and columns may differ by orders of magnitude, so every element has its own bound. With
// w = sum p|v|, the weighted mean of |v| that the element was added up from, A = the largest sum of
// magnitudes behind a score of the row, u the unit roundoffs of fp32 and of the dtype, and t the
// weights that fp32 and the dtype round to nothing:
//
//   fp32 part   f = u32 * (c + (2 + sqrt(D) / 2) A) * w + t32 * sum |v|
//   floor         = u_dtype * |o| + f
//   plain error   = r * (u_dtype * w + t_dtype * sum |v| + f), with one r for all the rows checked:
//                   the largest that the plain implementation shows; for 16-bit dtypes at least
//                   1/2, as weights rounded to the dtype may cost one unit by themselves
//   bound         = 2 * plain error + floor
//
// An O that was merged from parts over some of the keys each was rounded to its dtype once more,
// and its parts' weights come from their LSE, in fp32. Floor then grows by (u_dtype + u32 * (2 (c +
// (2 + sqrt(D) / 2) A) + 1 + |LSE|)) * w, and LSE's own doubles.
//
// sqrt(D) / 2: D roundings of a dot product add up like a random walk (Higham & Mary 2019).
// The same with w = |v| = 1 bounds LSE. Rows that see no key must be exactly 0 and -inf.
// A NaN or Inf in O passes only where the reference, or the plain implementation (scores beyond
// fp32's range), has the same one.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/problem.h"

namespace attend {

// One output row: sequence, query head, query row within the sequence.
struct RowId {
  int64_t b = 0;
  int64_t h = 0;
  int64_t i = 0;
};

struct RowsReport {
  bool ok = true;
  int64_t rows_checked = 0;
  int64_t rows_total = 0;
  double max_abs_error = 0;   // Inf if a NaN or Inf stands where none belongs
  double mean_abs_error = 0;  // over the elements with a finite error
  double bound = 0;           // of the element that has max_abs_error
  double max_lse_error = 0;   // if the problem returns LSE
  double lse_bound = 0;
  std::string detail;  // the worst fault, with its place; empty if ok
};

// All rows that `attention` writes, over sequences and heads.
int64_t CountRows(const Attention& attention);

// Compares the given rows of attention.o (and lse). Host memory; calling thread. `o_roundings` says
// how often O was rounded to its dtype on its way: 2 if it was merged from parts.
RowsReport CheckRows(const Attention& attention, std::span<const RowId> rows, int o_roundings = 1);

// Compares every row: for tests and small problems.
RowsReport CheckAllRows(const Attention& attention, int o_roundings = 1);

// Which rows to check: everything when rows * Lk * (D + Dv) fits `work_budget` multiply-adds, else
// a sample from `seed` spread evenly over (sequence, head, query tile), always with the first and
// last row of some sequence, and never fewer than one row. Rows that a pass over the whole output
// finds suspicious come first: a NaN or Inf, or (without NaN or Inf in V) a value outside the range
// of its column of V joined with 0, which no weighted mean can leave. The output is expected to
// have been poisoned with NaN before the kernel ran, so that an unwritten row is always among
// these.
std::vector<RowId> SampleRows(const Attention& attention, uint64_t seed, double work_budget);

// Fills the output (and LSE) with quiet NaNs.
void PoisonOutput(const Attention& attention);

}  // namespace attend
