// SPDX-License-Identifier: Apache-2.0
//
// Places for the answers of a work. For each, a thread repeats the request, which a server with
// shared memory or an engine in this process computes. For one thread.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "tests/bench/service/rounds.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

struct Slot {
  char* o = nullptr;  // where each answer is written, as long as `run` lives
  // Makes a request and waits for its answer; returns the device that computed it.
  std::function<Result<std::string>()> run;
};

class AnswerSlots {
 public:
  // `work` must outlive the object. `devices` is the number of devices that must take part.
  AnswerSlots(const Work& work, std::vector<Slot> slots, int devices);

  // Runs all slots once, concurrently, and checks each answer: the first in full, the others by its
  // bits, and in full if these differ.
  Status Check();
  // Only after Check. Each slot's thread checks every fourth answer, at pieces all over it that
  // were overwritten before.
  Result<Sample> Drive(double seconds);

 private:
  Status RunOnce(const Slot& slot, int64_t turn, std::set<std::string>* names) const;
  Status RunUntil(const Slot& slot, std::chrono::steady_clock::time_point end, int64_t* calls,
                  std::set<std::string>* names) const;

  const Work& work_;
  const std::vector<Slot> slots_;
  const int devices_;
  std::string pattern_;  // a correct O
};

}  // namespace attend::bench
