// SPDX-License-Identifier: Apache-2.0
//
// Compares the same shape computed in this process and on a server, one call at a time, in turns.

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
  double client_mean_ms = 0;  // encoding and copies in this process; not in phase_mean_ms
  std::vector<double> round_mean_ms;
  double elapsed_s = 0;
  VerifyQueue::Counts verified;
  bool failed = false;
};

struct ShapeResult {
  CallSpec spec;
  double flops = 0;
  std::vector<WayResult> ways;  // the first is the baseline
};

// Each round gives every way one turn, and starts with another way than the round before.
// `options`: duration_s or count cover all rounds together, warmup_s is per turn. A turn measures
// at least one call, unless interrupted. The last answer of each computed call is verified. `ways`
// must be over `calls`.
Result<std::vector<WayResult>> BenchWays(const LoadOptions& options, int64_t rounds,
                                         const std::vector<AttentionCall>& calls,
                                         const std::vector<std::unique_ptr<Way>>& ways,
                                         const std::atomic<bool>& interrupted,
                                         const LocalCall::NowNs& now);

// Ratios of the mean times of `way` and `here`, round by round.
struct TimesAsLong {
  double median = 0, lowest = 0, highest = 0;  // 0 without rounds
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
