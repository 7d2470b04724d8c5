// SPDX-License-Identifier: Apache-2.0
//
// The same shape computed in this process and served, one call at a time, in turns.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "client/load/load_stats.h"
#include "client/local/way.h"
#include "client/plot/chart.h"

namespace attend::client {

struct WayResult {
  std::string way;
  std::string kernel;
  Histogram latency;  // ns
  std::array<double, kPhases> phase_mean_ms = {};
  double client_mean_ms = 0;  // encoding and copies in this process; not in the network's time
  std::vector<double> round_mean_ms;
  double elapsed_s = 0;
  VerifyQueue::Counts verified;
  bool failed = false;
};

struct ShapeResult {
  CallSpec spec;
  double flops = 0;
  std::vector<WayResult> ways;  // the first is the one that the others are compared with
};

// Every round gives every way a turn, and begins with another one than the last round did.
// `options` say how long: duration_s or count are of all rounds together, warmup_s is of each turn.
// A turn measures at least one call, unless it is interrupted. The last answer of each call that a
// way computed is verified. `ways` are those of `calls`.
Result<std::vector<WayResult>> BenchWays(const LoadOptions& options, int64_t rounds,
                                         const std::vector<AttentionCall>& calls,
                                         const std::vector<std::unique_ptr<Way>>& ways,
                                         const std::atomic<bool>& interrupted,
                                         const LocalCall::NowNs& now);

// The times of `way` beside those of `here` in the same rounds.
struct TimesAsLong {
  double median = 0, lowest = 0, highest = 0;  // 0 if there was no round
};
TimesAsLong BesideHere(const WayResult& way, const WayResult& here);

struct BenchFile {
  LoadOptions options;
  int64_t rounds = 0;
  std::string device;
  std::string against;  // the server; empty: none
  std::vector<ShapeResult> shapes;
};
std::string BenchTable(const BenchFile& file);
std::string BenchJson(const BenchFile& file);
Figure BenchFigure(const BenchFile& file);

}  // namespace attend::client
