// SPDX-License-Identifier: Apache-2.0
//
// The counters of one measurement of `attend-client load`. LoadStats is a plain value. A
// LoadRecorder adds a lock; there is one per connection, so that recording meets no contention but
// can be read at any time.

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
#include "client/load/windows.h"
#include "client/tool/verify.h"
#include "kernels/util/mutex.h"

namespace attend::client {

// kNetwork is the latency from the send minus the server's total: gRPC here, the server's
// transport, the network and the client.
enum Phase { kReceive, kQueue, kCopyIn, kKernel, kCopyOut, kCheck, kTotal, kNetwork, kPhases };
inline constexpr std::array<const char*, kPhases> kPhaseNames = {
    "receive", "queue", "copy_in", "kernel", "copy_out", "check", "total", "network"};

// Answers from one server.
struct ServerCalls {
  std::string address;  // empty: there is only one server
  int64_t answered = 0;
  int64_t ok = 0;

  void Add(const std::string& from, Code code) {
    if (address.empty()) address = from;
    ++answered;
    ok += code == Code::kOk;
  }
};

struct LoadStats {
  // Answers to requests whose intended send was inside the measurement.
  int64_t sent = 0;
  std::map<Code, int64_t> by_code;
  std::map<Code, std::string> first_message;   // per code, except OK
  int64_t unexpected = 0;                      // statuses that the options do not explain
  Histogram from_intended;                     // ns, of OK answers
  Histogram from_sent;                         // ns, of OK answers
  std::array<Histogram, kPhases> phases;       // ns, from the server's report, and kNetwork
  double batch_requests = 0;                   // sum over OK answers
  int64_t held_back = 0;                       // sent late because --max-outstanding were in flight
  int64_t retries = 0;                         // attempts beyond each call's first
  std::map<std::string, ServerCalls> servers;  // by the server's name
  int64_t checks_passed = 0;                   // by the server
  int64_t checks_failed = 0;
  int64_t checks_undecided = 0;
  std::string first_check_failure;

  // OK answers that arrived inside the measurement, whenever sent.
  int64_t window_ok = 0;
  double window_bytes_in = 0;   // tensor bytes, requests
  double window_bytes_out = 0;  // tensor bytes, answers
  double window_flops = 0;

  int64_t ok() const { return by_code.contains(Code::kOk) ? by_code.at(Code::kOk) : 0; }
  void Merge(const LoadStats& other);
  void AddPhases(const PhaseTimings& timings, int64_t latency_ns);
};

struct LoadRecorder {
  Mutex mutex;
  // By window: of the intended send, or of an answer's arrival.
  std::map<int64_t, LoadStats> windows ATTEND_GUARDED_BY(mutex);
  LoadStats earlier ATTEND_GUARDED_BY(mutex);  // windows that will not be reported
  // Latency from the actual send since the last progress line.
  Histogram interval ATTEND_GUARDED_BY(mutex);
};

using LoadRecorders = std::vector<std::unique_ptr<LoadRecorder>>;

// Sum over the windows [first, last].
LoadStats Merged(const LoadRecorders& recorders, int64_t first, int64_t last);
// Sum over the windows before `first`, which are merged into `earlier` and dropped.
LoadStats MergeEarlier(const LoadRecorders& recorders, int64_t first);

// For a progress line: answers since the last one, and totals. Starts the next interval.
struct LoadInterval {
  Histogram from_sent;
  int64_t unexpected = 0;
  double window_bytes = 0;
};
LoadInterval TakeInterval(const LoadRecorders& recorders);

// A finished measurement.
struct LoadResult {
  LoadStep step;
  LoadStats stats;    // of the reported windows
  LoadStats earlier;  // of the windows before; only failures matter
  VerifyQueue::Counts verified;
  double elapsed_s = 0;    // of the measurement
  int64_t unanswered = 0;  // when the grace period was over
  int64_t due = 0;         // intended send inside the measurement
  int64_t due_unsent = 0;  // of those, not sent before its end
  bool interrupted = false;
  std::vector<WindowResult> windows;  // all, the reported ones last
  int64_t first_reported = 0;
  bool stable = false;  // by the options' rule
  WindowSpread spread;  // of the last windows

  double per_s(double amount) const { return elapsed_s > 0 ? amount / elapsed_s : 0; }
  double requests_per_s() const { return per_s(static_cast<double>(stats.window_ok)); }
  // Share of the due requests whose latency is known.
  double latency_share() const {
    return due > 0 ? static_cast<double>(stats.from_intended.count()) / static_cast<double>(due)
                   : 1;
  }
  bool failed() const {
    return stats.unexpected + earlier.unexpected > 0 ||
           stats.checks_failed + earlier.checks_failed > 0 || verified.failed > 0 ||
           (unanswered + due_unsent > 0 && !interrupted);
  }
};

// Result of the search for the highest rate with a bounded p99.
struct FoundRate {
  double p99_ms = 0;        // the bound
  double rate_per_s = 0;    // 0: no measured rate met it
  double lowest_per_s = 0;  // lowest rate that failed; 0: none did
  bool finished = false;
};

// For people and for programs.
std::string LoadTable(const LoadOptions& options, const std::vector<LoadResult>& results);
std::string LoadJson(const LoadOptions& options, const std::vector<LoadResult>& results,
                     const std::optional<FoundRate>& found = {});

}  // namespace attend::client
