// SPDX-License-Identifier: Apache-2.0
//
// The reference check of answers, on threads of its own so that neither lanes nor the completion
// threads wait for double precision, and of lower priority than theirs. The cost of one check is
// bounded by a budget of multiply-adds at any length.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "server/clock.h"
#include "server/request.h"

namespace attend {

struct CheckerOptions {
  double sample = 0;             // share of requests that the server checks by itself, 0 to 1
  double work_budget = 1 << 26;  // multiply-adds of one check: some 0.1 s of one core
  double sampled_work_budget = 1 << 18;  // of one that the server asked for
  int threads = 1;
  // While so many checks wait or run, no request becomes one of the server's own samples. Several
  // may be taken before the first of them has been computed, and then wait for each other.
  int64_t backlog_max = 256;
  uint64_t seed = 1;
};

class Checker {
 public:
  // `finish` receives each request with its report set, or, if its deadline passed before, with
  // that as its status; called on a checker thread.
  Checker(const CheckerOptions& options, const Clock& clock,
          std::function<void(std::unique_ptr<Request>)> finish);
  ~Checker();  // checks what was posted, then joins

  // Whether the server wants request `id` checked: a seeded draw, the same for the same id.
  bool Sampled(uint64_t id) const;
  // False if the backlog is full, for checks that may be left out.
  bool HasRoom() const;
  void Post(std::unique_ptr<Request> request);

 private:
  void Run();
  void Check(std::unique_ptr<Request> request);

  const CheckerOptions options_;
  const Clock& clock_;
  const std::function<void(std::unique_ptr<Request>)> finish_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::unique_ptr<Request>> posted_;
  int64_t running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace attend
