// SPDX-License-Identifier: Apache-2.0
//
// Attentions whose inputs are unusual bit patterns (NaN of any payload and sign, Inf, subnormal
// numbers, the largest numbers, masks of finite minima), and a judge that knows which NaN and Inf
// IEEE arithmetic makes of them, in any order of a kernel's additions.

#pragma once

#include <cstdint>
#include <string>

#include "tests/kernels/support/problems.h"

namespace attend::test {

// Turns some of the values of `owned` into such patterns. Which inputs, how many of their elements
// and which kinds of pattern are drawn from `seed` too, so that rows of all outcomes occur.
void SpoilBits(OwnedAttention* owned, uint64_t seed);

// Q, K and V become numbers of either sign and of any magnitude in the dtype: most scores overflow
// in between, and sums cancel to nothing.
void SpreadMagnitudes(OwnedAttention* owned, uint64_t seed);

// A spec like RandomSpec's, sometimes with a scale near an end of fp32's range.
ProblemSpec BitPatternSpec(uint64_t seed, double work_max);

// Details that depend on a kernel's order of arithmetic, besides those that the reference leaves
// open.
struct Leeway {
  // A weight may be too small for the kernel, and Inf times it NaN; and NaN or Inf in V may affect
  // a row whose score for the key is computed to be -Inf.
  bool vanishing_weights = false;
};

struct Verdict {
  std::string fault;     // the first one, with its place; empty if there is none
  int64_t values = 0;    // rows that were compared number for number
  int64_t specials = 0;  // rows with NaN or Inf that IEEE determines
  int64_t open = 0;      // rows that may have any value: some intermediate sum may overflow
};

// Compares every row with the reference.
Verdict JudgeBits(const OwnedAttention& owned, const Leeway& leeway);

}  // namespace attend::test
