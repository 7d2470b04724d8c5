// SPDX-License-Identifier: Apache-2.0
//
// Places for answers of one work, each asked for again and again by a thread of its own.
// They are computed by a server over shared memory, or an engine in this process. For one thread.

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
  // One request, from call to answer: the device that computed it.
  std::function<Result<std::string>()> run;
};

class AnswerSlots {
 public:
  // `work` must outlive the object; `devices` is how many must take part.
  AnswerSlots(const Work& work, std::vector<Slot> slots, int devices);

  // Every slot once, all at the same time, and each answer judged: the first in full, the others by
  // its bits, and in full where these differ.
  Status Check();
  // After Check. Each slot's thread looks at every fourth answer, at pieces all over it that were
  // no answer before.
  Result<Sample> Drive(double seconds);

 private:
  Status RunOnce(const Slot& slot, int64_t turn, std::set<std::string>* names) const;
  Status RunUntil(const Slot& slot, std::chrono::steady_clock::time_point end, int64_t* calls,
                  std::set<std::string>* names) const;

  const Work& work_;
  const std::vector<Slot> slots_;
  const int devices_;
  std::string pattern_;  // a right O
};

}  // namespace attend::bench
