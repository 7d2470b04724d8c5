// SPDX-License-Identifier: Apache-2.0
//
// The same shape computed in this process and served, one call at a time.

#pragma once

#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "client/load/load_stats.h"
#include "client/local/local_call.h"
#include "client/plot/chart.h"

namespace attend::client {

// One way to compute a shape.
struct WayResult {
  std::string way;  // "here, cpu", "served, inline"
  std::string kernel;
  Histogram latency;  // ns
  std::array<double, kPhases> phase_mean_ms = {};
  double elapsed_s = 0;
  VerifyQueue::Counts verified;
  bool failed = false;
};

struct ShapeResult {
  CallSpec spec;
  double flops = 0;
  std::vector<WayResult> ways;
};

// `options` say what is measured and for how long: mix (of one shape), pool, seed, warmup_s,
// duration_s or count. One answer of each input is verified.
Result<WayResult> BenchHere(const LoadOptions& options, int32_t device,
                            const std::atomic<bool>& interrupted, const LocalCall::NowNs& now);
// One caller's calls to the server of options.client, one after another.
Result<WayResult> BenchServed(const LoadOptions& options, const std::atomic<bool>& interrupted);

struct BenchFile {
  LoadOptions options;  // of the first way
  std::string device;
  std::string against;  // the server; empty: none
  std::vector<ShapeResult> shapes;
};
std::string BenchTable(const BenchFile& file);
std::string BenchJson(const BenchFile& file);
Figure BenchFigure(const BenchFile& file);

}  // namespace attend::client
