// SPDX-License-Identifier: Apache-2.0
//
// One measurement: begin, windows, end, and the outcome of its requests. Any thread records; one
// thread judges the windows. Times come from the caller.

#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "client/load/load_stats.h"

namespace attend::client {

class Measurement {
 public:
  // Begins at begin_ns, with one recorder per connection.
  Measurement(const LoadOptions& options, int connections, int64_t begin_ns);

  int64_t begin_ns() const { return plan_.BeginOf(0); }
  // Requests intended for this time or later are not sent. INT64_MAX with a request count.
  int64_t end_ns() const { return end_ns_; }
  // Begin of the reported windows, as far as known.
  int64_t reported_from_ns() const { return plan_.BeginOf(first_reported_); }
  int64_t window_of(int64_t ns) const { return plan_.IndexOf(ns); }
  const LoadRecorders& recorders() const { return recorders_; }

  // Counts a request that is sent.
  void CountDue(int64_t intended_ns) { ++due_in_[static_cast<size_t>(window_of(intended_ns))]; }

  // Judges the windows that have ended; ends the measurement if no more are needed.
  void Judge(int64_t now_ns);
  // Time of the next Judge.
  int64_t next_ns() const {
    return plan_.BeginOf(static_cast<int64_t>(plan_.windows().size()) + 1);
  }
  void Interrupt(int64_t now_ns);
  // To be called when all answers have arrived, the last one at last_answer_ns: fills in the
  // windows, their counters, their length and the requests due.
  void Fill(int64_t last_answer_ns, LoadResult* result);

 private:
  // The window with the answers received so far.
  WindowResult WindowAt(int64_t index) const;

  const LoadOptions& options_;
  WindowPlan plan_;  // windows() is the judging thread's
  LoadRecorders recorders_;
  std::vector<std::atomic<int64_t>> due_in_;  // by window
  std::atomic<int64_t> end_ns_;
  std::atomic<int64_t> first_reported_{0};
};

}  // namespace attend::client
