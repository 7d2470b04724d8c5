// SPDX-License-Identifier: Apache-2.0
//
// Judges the gradients of a backward pass on a sample of their rows, at bounded cost, against
// double precision from q, k, v, bias, sinks, dO and dLSE, with each row's full softmax: the O and
// LSE that the pass was given are not part of the truth. Their rounding is part of the bound. For a
// part of the keys, O and LSE are the whole's and are taken as given.
//
// A row of dQ needs its keys; a row of dK or dV needs all rows that see the key, and each of those
// needs its whole softmax. If the softmax of all rows fits the budget, all of them are computed
// whole (row_weights.h). In larger problems, those of the sampled rows of dQ are, and elsewhere the
// rows whose LSE alone leaves weights open by more than 2^-10, as far as the budget goes. The
// others use the given LSE, and delta = dO . O. A sample of the given O and LSE is itself judged as
// an answer (check_rows.h), so gradients from the LSE of other data fail there; if a gradient
// is wrong, so are the O and LSE of the rows that it depends on, as far as 2^26 multiply-adds go.
//
// With u fp32's unit roundoff, u_o that of O's dtype, c(n) = (2 + sqrt(n) / 2) u the error of a sum
// of n products relative to the sum of their magnitudes, s(n) = (1 + n) 2^-150 its further error if
// the products are subnormal, x = score - LSE, z = max(1, |scale|), E the bound on the score's
// error, and R, S and K of score_rounding.h, a pass in fp32 is off by at most
//
//   P      its log by e = E + e_LSE + 2 u |x| (4 u |x| as given, for 16-bit dtypes): err P =
//          P (exp(e) - 1), but no more than reaches the further of 0 and 1, and 4 u P + 2^-126
//   e_LSE  of a whole row: max(log(1 + R / S), log(S / K)) + min(4 u |LSE| + |LSE given - LSE|,
//          2^-10) + (8 + sqrt(n) / 2) u. As given: 8 u (1 + |LSE|), for 16-bit dtypes 12 u (1 +
//          |LSE|), + (c(D) + t u) |scale| |q| max |k| of the keys the row sees, t: D / 8 for
//          16-bit dtypes, else 0
//   dP     c(Dv) sum |dO||V| + s(Dv)
//   less   = delta - dLSE. Of a whole row: |dO . (O given) - delta|, the larger of c(Dv) sum
//          |dO||O| and (c(Dv) + c(n)) sum P|dO||V|, s(Dv), u |less|, and the effect of err P on
//          sum P dP, bounded as for O: no more than reaches the further end of dP. As given:
//          (c(Dv) + 4 u_o) sum |dO||O| + 4 t_o sum |dO| + s(Dv) + u |less|, t_o half a subnormal
//          step of O's dtype
//   m      = dP - less: the errors of both, and u |m|
//   dS     = P m: (P + err P) err m + err P |m| + 2 u |dS| + 2^-149
//   slope  1 - t^2, t = capped / cap: err t = E / cap, err slope = (2 + err t) err t + 4 u
//   dT     scale (slope err dS + |dS| err slope) + 2 u |dT| + z 2^-150
//
//   dQ     sum err dT |K| + c(n) sum |dT||K| + z s(n) over the row's n keys, where sum err P is at
//          most 2: what some weights gain, others lose
//   dK     sum err dT |Q| + c(n) sum |dT||Q| + z s(n) over the n rows that see the key
//   dV     sum err P |dO| + c(n) sum P |dO| + s(n) likewise
//   dBias  sum err dS + c(n) sum |dS| + s(n) over what bias broadcasts
//   dSink  sum err P |less| + (P + err P) err less + c(n) sum P |less| + s(n) over n rows, P the
//          sink's weight
//
// and the rounding to each gradient's dtype. The 2^-10 are the contract's (gradients.h): every
// row's weights sum to 1 however large its LSE is, so a pass that relies on an LSE with a larger
// rounding error is wrong. Kernels that round the weights of 16-bit dtypes (RoundsWeights in
// select.h) round P, and dS times its slope, to the dtype as factors: this adds u of the dtype, and
// half a subnormal step, to err P of dV and, times scale, to err dT. Dropout's factor is part of
// dP, and of P in dV, and of their errors, which it raises by 2 u: the factor is rounded, and so is
// the product with it. It also scales s(Dv) of dP and s(n) of dV.
//
// Over the keys of a KV head dV must add up to what dO does over its rows (sum_of_weights.h).
//
// Each bound is compared with g, the magnitude that the gradient's row would have if nothing in it
// cancelled. If err P alone makes up 0.1 % of g, summed over the elements, the row counts as wide.
// If it makes up all of g, as for a row whose keys all score -1e9, 0 is within the bound: the row
// cannot be judged. Nor can a row if fp32 weights may be NaN where double has none, if an element
// is not finite and fp32 may have left its range on the way there (MayOverflow), if the budget
// did not reach a row of O that had to be computed whole, or if an element is finite where the
// truth is not and all weights of that NaN or Inf are below 2^-20, which a kernel may flush to 0;
// with a larger weight the element is wrong. Unjudged rows are counted and make the report not ok:
// undecided, if nothing else is wrong. NaN and Inf are right wherever the truth has either.

#pragma once

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/reference/check_rows.h"

namespace attend {

// Host memory; calling thread. Judges everything if it fits `work_budget`, in multiply-adds as
// CheckWork counts them; else of each gradient first the rows with NaN or Inf, then a sample that
// `seed` spreads evenly, always at least one. Rows of the report are rows of gradients; the O and
// LSE rows that were judged are not counted. `weights_rounded`: the pass is of a kernel that rounds
// the weights of 16-bit problems. Returns within milliseconds once `stop` is set; the report is
// then meaningless.
RowsReport CheckGradients(const Attention& attention, const Gradients& gradients, uint64_t seed,
                          double work_budget, const StopFlag* stop = nullptr,
                          bool weights_rounded = true);

}  // namespace attend
