// SPDX-License-Identifier: Apache-2.0
//
// The argument of --concurrency, --rate and --sessions: values and ranges, in perf_analyzer's
// syntax. Pure.

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
// INVALID_ARGUMENT, with `flag`: other text, values outside [low, high], fractions if `whole`, or
// more than 1000 values.
struct ValueBounds {
  double low, high;
  bool whole = false;
};
Result<std::vector<double>> ParseValues(const std::string& flag, const std::string& text,
                                        const ValueBounds& bounds);

}  // namespace attend::client
