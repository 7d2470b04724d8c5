// SPDX-License-Identifier: Apache-2.0
//
// What one measurement of `attend-client load` counts. LoadStats is a plain value; a LoadRecorder
// adds a lock, one for every connection, so that recording meets no contention but readers may look
// in at any time.

#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/call/attention_call.h"
#include "client/load/histogram.h"
#include "client/load/load_options.h"
#include "client/tool/verify.h"
#include "kernels/util/mutex.h"

namespace attend::client {

enum Phase { kReceive, kQueue, kCopyIn, kKernel, kCopyOut, kCheck, kTotal, kPhases };
inline constexpr std::array<const char*, kPhases> kPhaseNames = {
    "receive", "queue", "copy_in", "kernel", "copy_out", "check", "total"};

struct LoadStats {
  // Answers to requests that were meant to be sent inside the measurement.
  int64_t sent = 0;
  std::map<Code, int64_t> by_code;
  std::map<Code, std::string> first_message;  // of every code but OK
  int64_t unexpected = 0;                     // statuses that nothing in the options explains
  Histogram from_intended;                    // ns, of OK answers
  Histogram from_sent;                        // ns, of OK answers
  std::array<Histogram, kPhases> phases;      // ns, as the server reports them
  double batch_requests = 0;                  // sum over OK answers
  int64_t held_back = 0;                      // sent late, as --max-outstanding were unanswered
  int64_t checks_passed = 0;                  // by the server
  int64_t checks_failed = 0;
  std::string first_check_failure;

  // OK answers that arrived inside the measurement, whenever they were sent.
  int64_t window_ok = 0;
  double window_bytes_in = 0;   // tensor bytes to the server
  double window_bytes_out = 0;  // and back
  double window_flops = 0;

  void Merge(const LoadStats& other);
  void AddPhases(const PhaseTimings& timings);
};

struct LoadRecorder {
  Mutex mutex;
  LoadStats stats ATTEND_GUARDED_BY(mutex);
  // Latency from the actual send since the last progress line.
  Histogram interval ATTEND_GUARDED_BY(mutex);
};

using LoadRecorders = std::vector<std::unique_ptr<LoadRecorder>>;

LoadStats Merged(const LoadRecorders& recorders);

// For a progress line: answers since the last one, and totals. Begins the next interval.
struct LoadInterval {
  Histogram from_sent;
  int64_t unexpected = 0;
  double window_bytes = 0;
};
LoadInterval TakeInterval(const LoadRecorders& recorders);

// One finished measurement.
struct LoadResult {
  LoadStep step;
  LoadStats stats;
  VerifyQueue::Counts verified;
  double elapsed_s = 0;    // of the measurement
  int64_t unanswered = 0;  // given up at the end, after the grace period
  int64_t due = 0;         // meant to be sent inside the measurement
  int64_t due_unsent = 0;  // of those, still waiting to be sent at its end
  bool interrupted = false;

  double requests_per_s() const { return elapsed_s > 0 ? stats.window_ok / elapsed_s : 0; }
  // The share of the requests that were due whose latencies are known.
  double latency_share() const {
    return due > 0 ? static_cast<double>(stats.from_intended.count()) / static_cast<double>(due)
                   : 1;
  }
  bool failed() const {
    return stats.unexpected > 0 || stats.checks_failed > 0 || verified.failed > 0 ||
           (unanswered + due_unsent > 0 && !interrupted);
  }
};

// What a search for the highest rate with a bounded p99 found.
struct FoundRate {
  double p99_ms = 0;        // the bound
  double rate_per_s = 0;    // 0: none of those measured met it
  double lowest_per_s = 0;  // that did not meet it; 0: all did
  bool finished = false;
};

// "20000" or "0.0122": never an exponent.
std::string RateText(double per_s);

// For people, for programs, for spreadsheets.
std::string LoadTable(const LoadOptions& options, const std::vector<LoadResult>& results);
std::string LoadJson(const LoadOptions& options, const std::vector<LoadResult>& results,
                     const std::optional<FoundRate>& found = {});
// Each line says all that it is about, so that files can be put together.
std::string LoadCsv(const LoadOptions& options, const std::vector<LoadResult>& results,
                    const std::optional<FoundRate>& found = {});

}  // namespace attend::client
