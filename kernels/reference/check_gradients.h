// SPDX-License-Identifier: Apache-2.0
//
// Judges the gradients of a backward pass at a sample of their rows, at bounded cost: against
// double precision, with a bound that is derived.
//
// A row of dQ takes its keys, a row of dK or dV all rows that see the key. To compute each of those
// rows' softmax anew would cost as much as the whole. So the truth is what the formulas of
// gradients.h make of the O and LSE that the pass was given: P = exp(score - LSE), delta = dO . O.
// A sample of those is judged by itself, as an answer (check_rows.h): gradients from the LSE of
// other data fail there.
//
// With u fp32's unit roundoff, u_o that of O's dtype, c(n) = (2 + sqrt(n) / 2) u what a sum of n
// products is off by, relative to the sum of their magnitudes, s(n) = (1 + n) 2^-150 what it is off
// by beside that if it is of subnormal numbers, z = max(1, |scale|), x = score - LSE, and E the
// bound on the score's error (score_rounding.h), a pass in fp32 is off by at most
//
//   P      rho = exp(E + e_LSE + 2 u |x|) - 1 + 4 u,     |err P| <= rho P + 2^-126
//   e_LSE  8 u (1 + |LSE|) + (c(D) + t u) |scale| |q| max |k|,   t: D / 8 for 16-bit dtypes, else 0
//   dP     c(Dv) sum |dO||V| + s(Dv)
//   less   = delta - dLSE: (c(Dv) + 4 u_o) sum |dO||O| + s(Dv) + u |less|
//   m      = dP - less: the errors of both, and u |m|
//   dS     = P m: (P + err P) err m + err P |m| + 2 u |dS| + 2^-149
//   slope  1 - t^2, t = capped / softcap: err t = E / softcap, err slope = (2 + err t) err t + 4 u
//   dT     scale (slope err dS + |dS| err slope) + 2 u |dT| + z 2^-150
//
//   dQ     sum err dT |K| + c(n) sum |dT||K| + z s(n) over the row's n keys
//   dK     sum err dT |Q| + c(n) sum |dT||Q| + z s(n) over the n rows that see the key
//   dV     sum err P |dO| + c(n) sum P |dO| + s(n) likewise
//   dBias  sum err dS + c(n) sum |dS| + s(n) over what bias broadcasts
//   dSink  sum err P |less| + (P + err P) err less + c(n) sum P |less| + s(n) over n rows,
//          P = exp(sink - LSE), err P = P (exp(e_LSE) - 1 + 4 u)
//
// and the rounding to each gradient's dtype. Of 16-bit dtypes, Tensor Cores take P and dS as
// factors rounded to the dtype (u of the dtype, and half a step of subnormal numbers more in err P
// of dV and in err dS of dT), and x is the difference of two products with log2(e): 2 u (|score| +
// |LSE|) more. e_LSE and the 4 u_o are there because a pass may as well compute O and LSE anew, as
// cpu_reference does: then it has what theirs were rounded from. Dropout's factor is in dP, and in
// P as dV has it, and in the errors of both, which it makes 2 u larger: it is rounded, and so is
// the product with it. It is also in s(Dv) of dP and in s(n) of dV.
//
// Elements whose truth is not a finite number are not judged; elements that are not, and should be,
// fail.

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
// of O and LSE that were judged are not among them. Left within milliseconds once `stop` is set;
// the report then means nothing.
RowsReport CheckGradients(const Attention& attention, const Gradients& gradients, uint64_t seed,
                          double work_budget, const StopFlag* stop = nullptr);

}  // namespace attend
