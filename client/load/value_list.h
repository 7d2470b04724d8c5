// SPDX-License-Identifier: Apache-2.0
//
// What --concurrency, --rate and --sessions take: values and ranges, as perf_analyzer writes them.
// Pure.

#pragma once

#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::client {

// A comma-separated list of
//   V                    one value
//   FIRST:LAST           steps of 1
//   FIRST:LAST:STEP      FIRST, FIRST + STEP, ... up to LAST; also written FIRST:LAST:+STEP
//   FIRST:LAST:xFACTOR   FIRST, FIRST * FACTOR, ... up to LAST
// INVALID_ARGUMENT, with `flag`, for what is none of these, values outside [low, high], fractions
// if `whole`, and more than 1000 values.
struct ValueBounds {
  double low, high;
  bool whole = false;
};
Result<std::vector<double>> ParseValues(const std::string& flag, const std::string& text,
                                        const ValueBounds& bounds);

}  // namespace attend::client
