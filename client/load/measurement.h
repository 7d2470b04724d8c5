// SPDX-License-Identifier: Apache-2.0
//
// One measurement: its beginning, its windows and its end, and what its requests became. Any thread
// records; one thread judges the windows. Times come from outside.

#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "client/load/load_stats.h"

namespace attend::client {

class Measurement {
 public:
  // Begins at begin_ns, with a recorder for each connection.
  Measurement(const LoadOptions& options, int connections, int64_t begin_ns);

  int64_t begin_ns() const { return plan_.BeginOf(0); }
  // Requests meant for this moment or later are not sent. INT64_MAX for a number of requests.
  int64_t end_ns() const { return end_ns_; }
  // Where the windows begin that the report will be about, as far as is known.
  int64_t reported_from_ns() const { return plan_.BeginOf(first_reported_); }
  int64_t window_of(int64_t ns) const { return plan_.IndexOf(ns); }
  const LoadRecorders& recorders() const { return recorders_; }

  // A request meant for this moment is sent.
  void CountDue(int64_t intended_ns) { ++due_in_[static_cast<size_t>(window_of(intended_ns))]; }

  // Looks at the windows that have ended, and ends the measurement if no more are needed.
  void Judge(int64_t now_ns);
  // When to judge next.
  int64_t next_ns() const {
    return plan_.BeginOf(static_cast<int64_t>(plan_.windows().size()) + 1);
  }
  void Interrupt(int64_t now_ns);
  // When all answers are there, of which the last one came at last_answer_ns: the windows, what was
  // counted in them, how long they were and what was due in them.
  void Fill(int64_t last_answer_ns, LoadResult* result);

 private:
  // As far as it has been answered.
  WindowResult WindowAt(int64_t index) const;

  const LoadOptions& options_;
  WindowPlan plan_;  // windows() is the judging thread's
  LoadRecorders recorders_;
  std::vector<std::atomic<int64_t>> due_in_;  // by window
  std::atomic<int64_t> end_ns_;
  std::atomic<int64_t> first_reported_{0};
};

}  // namespace attend::client
