// SPDX-License-Identifier: Apache-2.0
//
// Judges output rows against double precision, with a bound that is derived, not chosen:
//
//   bound = 2 * (error of a plain same-precision implementation on the same rows) + floor
//
// The plain implementation is standard attention in the problem's dtype (plain_row.h). The factor 2
// and the floor follow FlashAttention's tests (Dao-AILab, hopper/test_flash_attn.py). The floor
// covers rounding alone: one rounding of O to its dtype, a few of every weight, and fp32's rounding
// of each score carried through exp.
//
// Rows and columns may differ by orders of magnitude, so every element has its own bound. With w =
// sum p|v|, the weighted mean of |v| for the element, n keys, u the unit roundoffs of fp32, of the
// dtype and of O, and `moved` and `lost` of score_rounding.h (the effect of the scores' rounding on
// the element, each key weighed by its weight; the loss from weights that are too small for the
// dtype):
//
//   f           = (8 + sqrt(n) / 4) u32 w + moved
//   floor       = u_o |o| + f + lost (but for fp16) + m / 4 u32 w (for 16-bit dtypes) + tiny
//   unit        = u_dtype w + f + lost + sqrt(n) / 4 u32 w
//   bound       = 2 r unit + floor
//
// r is the plain implementation's largest error in units, beside O's own rounding: in the element's
// own row, or, up to 2, in any checked row. So bad luck of the plain implementation in one row does
// not excuse other rows, and a row in which it is far off for a reason has that reason in its unit.
// For 16-bit dtypes r is at least 1/2, because weights rounded to the dtype may cost one unit by
// themselves.
//
// A kernel that does not round weights to 16 bits has fp32's bound beside O's own rounding, and so
// does the plain implementation then: u_dtype is u32, r at least 0, and m and fp16's `lost` are 0.
//
// m is n without the keys whose weight is below 2^-40 of the largest. Tensor Cores truncate a
// product a few bits below the last bit of the running sum, and never round up: a sum of like
// values is short by 1 / 9 u32 a key on an H200 with random bits, 1 / 6 in the worst case, and
// twice that where one bit less is kept (Fasi et al. 2021).
//
// tiny is half a step between the dtype's subnormal numbers plus, because fp32 sums are rounded
// before they are multiplied by dropout's factor g, g (1 + n) 2^-150.
//
// sqrt(n) / 4 is the error of a sum of n weights that is split into at least four sums; the plain
// implementation may be lucky and have none. LSE has f with w = 1 and, for `moved`, the effect of
// rounding on the scores; its floor adds u32 |LSE|. Rows that see no key must be exactly 0 and
// -inf. Dropout's factor is part of v; f then has 2 u32 w more.
//
// Roundings are relative to the rounded value, so `moved`, where finite, is added to w, and to
// |LSE|.
//
// Keys without weight cannot loosen the bound, however large their scores. Beside padding at -1e9
// the check detects a fault of 0.1 % of w in fp32, of 8 roundoffs of w in fp16 and bf16 (up to
// 131,072 and 1,048,576 keys with weight: beyond that Tensor Cores themselves may be off by more),
// and of 1e-4 in LSE (1e-3 from some tens of thousands of keys on, whose plain sum drifts). It
// cannot in a row whose keys all have such scores: at 1e9 fp32 numbers are 64 apart, and correct
// kernels differ. A row where `moved` exceeds 2^-10 w is `wide` and counted in the report. Its O
// may be anywhere in the range of the visible keys' v (and 0 for sinks and dropout), plus the
// roundings of the largest of them.
//
// NaN and Inf in the inputs follow IEEE: O and LSE must contain what the reference makes of them.
// Finite inputs whose scores are in fp32's range give finite weights, and O, a mean of finite
// values, is finite: V = 3e38 on two equal keys is 3e38, though the sum before the division
// overflows. So a NaN or Inf where the reference has none passes in three cases only: the plain
// implementation has the same (Inf times a weight too small for fp32; a score beyond its range);
// the value rounds to Inf, or would within its bound; or a sum of a score's terms, taken in some
// order, overflows (score_rounding.h), which may make the row NaN. There a finite O need only stay
// in V's range joined with 0, as in wide rows. The bound itself is never NaN.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

struct RowsReport {
  bool ok = true;  // every checked row was judged, and is right
  bool undecided = false;
  bool of_inputs = false;  // the request's O and LSE are wrong: nothing is known of the answer
  int64_t rows_checked = 0;
  int64_t rows_total = 0;
  int64_t rows_wide = 0;      // of the checked ones: see above, and check_gradients.h
  int64_t rows_unjudged = 0;  // of the checked ones, gradient rows that cannot be judged
  double max_abs_error = 0;   // Inf if there is a NaN or Inf where none belongs
  double mean_abs_error = 0;  // over the elements with a finite error
  double bound = 0;           // of the element that has max_abs_error
  double max_lse_error = 0;   // if the problem returns LSE
  double lse_bound = 0;
  std::string detail;  // the worst fault, or the first unjudged row, with its place; empty if ok

  bool failed() const { return !ok && !undecided; }
};

// Number of rows that `attention` writes, over sequences and heads.
int64_t CountRows(const Attention& attention);

// Compares the given rows of attention.o (and lse). `weights_rounded`: they come from a kernel that
// rounds the weights of 16-bit problems (RoundsWeights in select.h). Host memory; calling thread.
// Returns within milliseconds once `stop` is set; the report is then meaningless.
RowsReport CheckRows(const Attention& attention, std::span<const RowId> rows,
                     const StopFlag* stop = nullptr, bool weights_rounded = true);

// Compares every row: for tests and small problems.
RowsReport CheckAllRows(const Attention& attention, bool weights_rounded = true);

// Cost of checking one row, in multiply-adds of double precision (1 to 2 ns each): a constant, plus
// D + Dv and the cost of the score terms for each of Lk keys.
double CheckWork(const Problem& problem);

// Upper bound of a sample, however cheap rows are.
inline constexpr int64_t kSampledRowsMax = 1 << 16;

// Which rows to check: everything if rows * CheckWork fits `work_budget`, else a sample from `seed`
// spread evenly over the rows of all sequences and heads, always with the first and last row of one
// sequence and head, and never fewer than one row. Rows that a pass over V and the whole output
// finds suspicious come first: a NaN or Inf, or (if V is finite) a value outside the range of its
// column of V (times dropout's factor) joined with 0, which no mean can leave. V may be null: then
// only NaN and Inf are suspicious. The output should be poisoned with NaN before the kernel runs,
// so that an unwritten row is always suspicious. Returns early with some rows once `stop` is set.
std::vector<RowId> SampleRows(const Attention& attention, uint64_t seed, double work_budget,
                              const StopFlag* stop = nullptr);

// Fills the output (and LSE) with quiet NaNs, until `stop` is set.
void PoisonOutput(const Attention& attention, const StopFlag* stop = nullptr);

}  // namespace attend
