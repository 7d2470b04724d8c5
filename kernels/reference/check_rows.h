// SPDX-License-Identifier: Apache-2.0
//
// Judges output rows against double precision, with a bound that is derived, not chosen:
//
//   bound = 2 * (error of a plain same-precision implementation on the same rows) + floor
//
// The plain implementation is standard attention in the problem's dtype (plain_row.h). The factor 2
// and the floor follow FlashAttention's tests (Dao-AILab, hopper/test_flash_attn.py). The floor is
// what rounding alone may cost: one rounding of O to its dtype, a few of every weight, and fp32's
// rounding of each score carried through exp.
//
// Rows and columns may differ by orders of magnitude, so every element has its own bound. With
// w = sum p|v|, the weighted mean of |v| that the element was added up from, n keys, u the unit
// roundoffs of fp32, of the dtype and of O, and `moved` and `lost` of score_rounding.h (what the
// scores' rounding does to the element, each key weighed by its weight; what weights cost that are
// too small for the dtype):
//
//   f           = (8 + sqrt(n) / 4) u32 w + moved
//   floor       = u_o |o| + f + lost (but for fp16) + m / 4 u32 w (for 16-bit dtypes) + tiny
//   unit        = u_dtype w + f + lost + sqrt(n) / 4 u32 w
//   bound       = 2 r unit + floor
//
// r is how many units the plain implementation is off by at most, beside O's own rounding: in the
// element's own row, or, up to 2, in any row checked. So bad luck of the plain implementation in
// one row does not excuse other rows, and a row in which it has reason to be far off has that in
// its unit. For 16-bit dtypes r is at least 1/2, as weights rounded to the dtype may cost one unit
// by themselves.
//
// A kernel that does not round weights to 16 bits has the bound of fp32 beside O's own rounding,
// and so has the plain implementation then: u_dtype is u32, r at least 0, and m and fp16's `lost`
// 0.
//
// m is n without the keys whose weight is below 2^-40 of the largest. Tensor Cores cut off the bits
// of a product that are a few bits below the last of the sum so far, and never round up: a sum of
// like values is short by 1 / 9 u32 a key on an H200 with values of random bits, 1 / 6 with the
// worst, and twice that where one bit less is kept (Fasi et al. 2021).
//
// tiny is half a step between the dtype's subnormal numbers and, as sums of fp32's are rounded
// before they are multiplied with dropout's factor g, g (1 + n) 2^-150.
//
// sqrt(n) / 4 is what a sum of n weights loses as four sums at least share the keys; the plain
// implementation may be lucky and lose nothing. LSE has f with w = 1, and for `moved` what rounding
// does to the scores; floor adds u32 |LSE|. Rows that see no key must be exactly 0 and -inf.
// Dropout's factor is in v; f then has 2 u32 w more.
//
// Roundings are relative to what is rounded, so that `moved`, where it is finite, is part of w, and
// of |LSE|.
//
// Keys without weight cannot loosen the bound, however large their scores: a fault of 0.1 % of w in
// fp32, of 8 roundoffs of w in fp16 and bf16 (up to 131,072 and 1,048,576 keys of weight: beyond
// that Tensor Cores themselves may be off by more), and of 1e-4 in LSE (1e-3 from some tens of
// thousands of keys on, whose plain sum drifts) is seen beside padding at -1e9. It is not in a row
// whose keys all have such scores: at 1e9 fp32 numbers are 64 apart, and right kernels differ. A
// row where `moved` is more than 2^-10 w is `wide` and counted in the report. Its O may be
// anywhere, but no further out than the visible keys' v, as a mean of them (and 0 for sinks and
// dropout), beside the roundings of the largest of them.
//
// NaN and Inf in the inputs follow IEEE: O and LSE must contain what the reference makes of them.
// Finite inputs whose scores are in fp32's range give finite weights, and O, a mean of finite
// values, is finite: V = 3e38 on two equal keys is 3e38, though the sum before the division is not
// in range. So a NaN or Inf where the reference has none passes in three cases only: the plain
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
  bool ok = true;  // every row checked was judged, and is right
  // Not ok for rows_unjudged alone: no row that was judged is wrong.
  bool undecided = false;
  bool of_inputs = false;  // what is wrong came with the request; nothing is said of the answer
  int64_t rows_checked = 0;
  int64_t rows_total = 0;
  int64_t rows_wide = 0;      // of those checked: see above, and check_gradients.h
  int64_t rows_unjudged = 0;  // of those checked, rows of gradients that cannot be: see there
  double max_abs_error = 0;   // Inf if there is a NaN or Inf where none belongs
  double mean_abs_error = 0;  // over the elements with a finite error
  double bound = 0;           // of the element that has max_abs_error
  double max_lse_error = 0;   // if the problem returns LSE
  double lse_bound = 0;
  std::string detail;  // the worst fault, or what is not judged, with its place; empty if ok

  bool failed() const { return !ok && !undecided; }
};

// All rows that `attention` writes, over sequences and heads.
int64_t CountRows(const Attention& attention);

// Compares the given rows of attention.o (and lse) of a kernel that rounds the weights of 16-bit
// problems, or does not (RoundsWeights in select.h). Host memory; calling thread. Left within
// milliseconds once `stop` is set; the report then means nothing.
RowsReport CheckRows(const Attention& attention, std::span<const RowId> rows,
                     const StopFlag* stop = nullptr, bool weights_rounded = true);

// Compares every row: for tests and small problems.
RowsReport CheckAllRows(const Attention& attention, bool weights_rounded = true);

// What checking one row costs, in multiply-adds of double precision (1 to 2 ns each): D + Dv and
// what goes with them for each of Lk keys, and what is done once.
double CheckWork(const Problem& problem);

// However cheap rows are, a sample is no larger.
inline constexpr int64_t kSampledRowsMax = 1 << 16;

// Which rows to check: everything when rows * CheckWork fits `work_budget`, else a sample from
// `seed` spread evenly over the rows of all sequences and heads, always with the first and last row
// of some sequence, and never fewer than one row. Rows that a pass over V and the whole output
// finds suspicious come first: a NaN or Inf, or (without NaN or Inf in V) a value outside the range
// of its column of V (times dropout's factor) joined with 0, which no mean can leave. V may be
// null: then only NaN and Inf are suspicious. The output is to have been poisoned with NaN before
// the kernel ran, so that an unwritten row is always among these. Once `stop` is set, some rows.
std::vector<RowId> SampleRows(const Attention& attention, uint64_t seed, double work_budget,
                              const StopFlag* stop = nullptr);

// Fills the output (and LSE) with quiet NaNs, until `stop` is set.
void PoisonOutput(const Attention& attention, const StopFlag* stop = nullptr);

}  // namespace attend
