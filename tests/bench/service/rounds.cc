// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/rounds.h"

#include <utility>

namespace attend::bench {

Result<std::vector<Samples>> RunRounds(std::span<const Contestant> contestants, int rounds,
                                       double seconds) {
  const size_t count = contestants.size();
  std::vector<Samples> all(count);
  for (int round = -1; round < rounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t which = (turn + static_cast<size_t>(round + 1)) % count;
      const std::string& name = contestants[which].name;
      const Result<Sample> sample = contestants[which].measure(seconds);
      if (!sample.ok()) {
        return Status(sample.status().code(), name + ": " + sample.status().message());
      }
      if (sample->calls <= 0 || sample->seconds <= 0) return Internal(name + ": no call ended");
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
