// SPDX-License-Identifier: Apache-2.0
//
// Judges the gradients of a backward pass at a sample of their rows, at bounded cost, against
// double precision of q, k, v, bias, sinks, dO and dLSE, as a softmax over whole rows has them: the
// O and LSE that the pass was given are no part of the truth. Their rounding is part of the bound.
// With a part of the keys they are the whole's, so there they are taken as given.
//
// A row of dQ takes its keys, a row of dK or dV all rows that see the key, and of each its whole
// softmax. Where the work for all rows' softmax is within the budget, all of them are computed
// (row_weights.h). In larger problems rows of dQ are, and elsewhere the rows whose LSE alone leaves
// weights open by more than 2^-10, as far as the budget goes. Of the others, LSE and delta = dO . O
// are those that were given. A sample of these is judged by itself, as an answer (check_rows.h), so
// gradients from the LSE of other data fail there.
//
// With u fp32's unit roundoff, u_o that of O's dtype, c(n) = (2 + sqrt(n) / 2) u what a sum of n
// products is off by, relative to the sum of their magnitudes, s(n) = (1 + n) 2^-150 what it is off
// by beside that if it is of subnormal numbers, z = max(1, |scale|), x = score - LSE, E the bound
// on the score's error, and R, S and K of score_rounding.h, a pass in fp32 is off by at most
//
//   P      its log by e = E + e_LSE + 2 u |x|: err P = P (exp(e) - 1), but no more than reaches the
//          further of 0 and 1, and 4 u P + 2^-126
//   e_LSE  of a whole row: max(log(1 + R / S), log(S / K)) + min(4 u |LSE| + |LSE given - LSE|,
//          2^-10) + (8 + sqrt(n) / 2) u. As given: 8 u (1 + |LSE|) + (c(D) + t u) |scale| |q|
//          max |k| of the keys the row sees, t: D / 8 for 16-bit dtypes, else 0
//   dP     c(Dv) sum |dO||V| + s(Dv)
//   less   = delta - dLSE. Of a whole row: |dO . (O given) - delta|, the larger of c(Dv) sum
//   |dO||O|
//          and (c(Dv) + c(n)) sum P|dO||V|, s(Dv), u |less|, and what err P makes of sum P dP, as
//          it does of O: no more than reaches the further end of dP. As given: (c(Dv) + 4 u_o) sum
//          |dO||O| + s(Dv) + u |less|
//   m      = dP - less: the errors of both, and u |m|
//   dS     = P m: (P + err P) err m + err P |m| + 2 u |dS| + 2^-149
//   slope  1 - t^2, t = capped / softcap: err t = E / softcap, err slope = (2 + err t) err t + 4 u
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
// and the rounding to each gradient's dtype. The 2^-10 are the contract's (gradients.h): weights
// sum to 1 in every row, however large its LSE is, so that a pass that goes by an LSE which
// rounding has spoilt more than that is wrong. Kernels that round the weights of 16-bit dtypes
// (RoundsWeights in select.h) take P, and dS times its slope, as factors rounded to the dtype: u of
// the dtype, and half a step of subnormal numbers more in err P of dV and, times scale, in err dT.
// Dropout's factor is in dP, and in P as dV has it, and in the errors of both, which it makes 2 u
// larger: it is rounded, and so is the product with it. It is also in s(Dv) of dP and in s(n) of
// dV.
//
// Over the keys of a KV head dV must add up to what dO does over its rows (sum_of_weights.h).
//
// Beside the bound stands what a row of a gradient would be if nothing in it cancelled, g. Where
// err P alone makes up 0.1 % of g, summed over the elements, the row is counted as wide. Where it
// makes up all of g, as for a row whose keys all have scores of -1e9, the bound is a number still,
// but 0 is within it: the row cannot be judged. Nor can a row if fp32 may have NaN for weights that
// are none in double, if the budget did not reach a row of O that would have to be whole, or if an
// element is finite where the truth is not and all weights beside that NaN or Inf are below 2^-20,
// which a kernel may take for 0; with a larger one the element is wrong. Such rows are counted too,
// and the report is not ok; it is undecided if there is nothing else. NaN and Inf where the truth
// has either are right.

#pragma once

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/reference/check_rows.h"

namespace attend {

// Host memory; calling thread. Everything is judged if it fits `work_budget`, in multiply-adds as
// CheckWork counts them; else of each gradient first the rows with NaN or Inf, then some that
// `seed` spreads evenly, and always at least one. Rows of the report are rows of gradients; those
// of O and LSE that were judged are not among them. The pass is of a kernel that rounds the weights
// of 16-bit problems, or does not. Left within milliseconds once `stop` is set; the report then
// means nothing.
RowsReport CheckGradients(const Attention& attention, const Gradients& gradients, uint64_t seed,
                          double work_budget, const StopFlag* stop = nullptr,
                          bool weights_rounded = true);

}  // namespace attend
