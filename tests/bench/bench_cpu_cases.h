// SPDX-License-Identifier: Apache-2.0
//
// The cases that bench_cpu times.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend::bench {

struct Case {
  std::string name;
  test::ProblemSpec spec;
  bool backward = false;
  bool decodes = false;  // bound by reading K and V
  bool rival = true;     // PyTorch supports the case
  char spoilt = 0;       // 'k' or 'v': has an element of `value`
  float value = 0;
};

// Sequences of one length, with as many KV heads as query heads.
Case Plain(int64_t b, int64_t h, int64_t length, int64_t d, DType dtype, bool causal = false,
           bool backward = false);

std::vector<Case> Cases();
// Some of them with one NaN or Inf in K or V of each KV head, which all rows see.
std::vector<Case> SpoiltCases();

}  // namespace attend::bench
