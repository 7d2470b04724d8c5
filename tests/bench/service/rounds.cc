// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/rounds.h"

#include <utility>

namespace attend::bench {
namespace {

// The warm-up of a turn, as a share of it. Without it, a contestant that also had the previous turn
// was up to a third faster than one whose threads, caches and connections had been idle; and with
// an odd number of rounds, one contestant has two turns in a row more often than the other.
constexpr double kWarmupShare = 0.5;

Result<Sample> TakeTurn(const Contestant& contestant, double seconds) {
  Result<Sample> sample = contestant.measure(seconds);
  if (!sample.ok()) {
    return Status(sample.status().code(), contestant.name + ": " + sample.status().message());
  }
  if (sample->calls <= 0 || sample->seconds <= 0) {
    return Internal(contestant.name + ": no call ended");
  }
  return sample;
}

}  // namespace

Result<std::vector<Samples>> RunRounds(std::span<const Contestant> contestants, int rounds,
                                       double seconds) {
  const size_t count = contestants.size();
  std::vector<Samples> all(count);
  for (int round = -1; round < rounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t which = (turn + static_cast<size_t>(round + 1)) % count;
      const Result<Sample> warm = TakeTurn(contestants[which], kWarmupShare * seconds);
      if (!warm.ok()) return warm.status();
      const Result<Sample> sample = TakeTurn(contestants[which], seconds);
      if (!sample.ok()) return sample.status();
      if (round >= 0) all[which].push_back(*sample);
    }
  }
  return all;
}

std::vector<double> Values(const Samples& samples, const std::function<double(const Sample&)>& of) {
  std::vector<double> values;
  for (const Sample& sample : samples) values.push_back(of(sample));
  return values;
}

}  // namespace attend::bench
