// SPDX-License-Identifier: Apache-2.0
//
// Random problems of which many can be split: RandomSpec's, the packed ones with more sequences.

#pragma once

#include <cstdint>
#include <random>

#include "tests/kernels/problems.h"

namespace attend::test {

inline ProblemSpec SplittableSpec(uint64_t seed, double work_max) {
  ProblemSpec spec = RandomSpec(seed, work_max);
  if (!spec.problem.packed) return spec;
  std::mt19937_64 random(seed);
  spec.q_lengths.clear();
  spec.kv_lengths.clear();
  for (uint64_t n = 2 + random() % 5; n > 0; --n) {
    spec.q_lengths.push_back(static_cast<int64_t>(random() % 13));
    spec.kv_lengths.push_back(static_cast<int64_t>(random() % 13));
  }
  return spec;
}

}  // namespace attend::test
