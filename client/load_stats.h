// SPDX-License-Identifier: Apache-2.0
//
// What one measurement of `attend-client load` counts. LoadStats is a plain value; a LoadRecorder
// adds a lock, one for every connection, so that recording meets no contention but readers may look
// in at any time.

#pragma once

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "client/attention_call.h"
#include "client/histogram.h"
#include "client/load_options.h"
#include "client/verify.h"

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
  int64_t held_back = 0;                      // sent late because too many were outstanding
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
  std::mutex mutex;
  LoadStats stats;
  Histogram interval;  // latency from the actual send since the last progress line
};

// One finished measurement.
struct LoadResult {
  LoadStep step;
  LoadStats stats;
  VerifyQueue::Counts verified;
  double elapsed_s = 0;    // of the measurement
  int64_t unanswered = 0;  // given up at the end, after the grace period
  bool interrupted = false;

  double requests_per_s() const { return elapsed_s > 0 ? stats.window_ok / elapsed_s : 0; }
  bool failed() const {
    return stats.unexpected > 0 || stats.checks_failed > 0 || verified.failed > 0 ||
           (unanswered > 0 && !interrupted);
  }
};

// For people, for programs, for spreadsheets.
std::string LoadTable(const LoadOptions& options, const std::vector<LoadResult>& results);
std::string LoadJson(const LoadOptions& options, const std::vector<LoadResult>& results);
std::string LoadCsv(const LoadOptions& options, const std::vector<LoadResult>& results);

}  // namespace attend::client
