// SPDX-License-Identifier: Apache-2.0
//
// Measures contestants in turns, round after round, so that changes of the machine affect all.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::bench {

// The measurement of a contestant in a round, in which all answers were correct.
struct Sample {
  int64_t calls = 0;
  int64_t bytes = 0;  // of messages in both directions
  double seconds = 0;
  double p50_us = 0;
  double p99_us = 0;
  double server_us = 0;  // processor time of the server per call; 0: not measured

  double calls_per_second() const { return static_cast<double>(calls) / seconds; }
  double gigabytes_per_second() const { return static_cast<double>(bytes) / seconds * 1e-9; }
};

struct Contestant {
  std::string name;
  // Runs for about `seconds`. An error, such as a wrong answer, instead of a sample.
  std::function<Result<Sample>(double seconds)> measure;
};

// The rounds of a contestant.
using Samples = std::vector<Sample>;

// Runs on the calling thread: a round that does not count, then `rounds` rounds, which begin with
// the contestants in turn. Each turn begins with a warm-up of half its length. The first error ends
// the run; it names the contestant.
Result<std::vector<Samples>> RunRounds(std::span<const Contestant> contestants, int rounds,
                                       double seconds);

// A value per round.
std::vector<double> Values(const Samples& samples, const std::function<double(const Sample&)>& of);

}  // namespace attend::bench
