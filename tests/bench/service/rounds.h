// SPDX-License-Identifier: Apache-2.0
//
// Who is measured, and how: in turns, round after round, so that what changes on the machine
// meanwhile changes for all.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::bench {

// What one contestant did in one round. All its answers were right.
struct Sample {
  int64_t calls = 0;
  int64_t bytes = 0;  // of messages, both ways
  double seconds = 0;
  double p50_us = 0;
  double p99_us = 0;
  double server_us = 0;  // processor time of the server, of each call; 0: not measured

  double calls_per_second() const { return static_cast<double>(calls) / seconds; }
  double gigabytes_per_second() const { return static_cast<double>(bytes) / seconds * 1e-9; }
};

struct Contestant {
  std::string name;
  // Works for about so long. An error, the first wrong answer for instance, leaves no sample.
  std::function<Result<Sample>(double seconds)> measure;
};

// One contestant's rounds.
using Samples = std::vector<Sample>;

// Calling thread. A round that is not counted, then `rounds`, each led by another contestant. Each
// turn begins with half as long that is not counted either. The first error, with its contestant's
// name, ends it.
Result<std::vector<Samples>> RunRounds(std::span<const Contestant> contestants, int rounds,
                                       double seconds);

// One value of each round.
std::vector<double> Values(const Samples& samples, const std::function<double(const Sample&)>& of);

}  // namespace attend::bench
