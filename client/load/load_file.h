// SPDX-License-Identifier: Apache-2.0
//
// A file of results, from any run, as plots and comparisons read it.

#pragma once

#include <array>
#include <string>
#include <vector>

#include "client/load/load_stats.h"

namespace attend::client {

struct LatencyFigures {
  int64_t count = 0;
  double mean_ms = 0, p50_ms = 0, p90_ms = 0, p99_ms = 0, p999_ms = 0, max_ms = 0;
};

struct FileWindow {
  double start_s = 0;
  double elapsed_s = 0;
  bool reported = true;
  double requests_per_s = 0;
  LatencyFigures latency;
};

struct FileBucket {
  double lower_ms, upper_ms;
  int64_t count;
};

struct FileStep {
  LoadStep step;
  double elapsed_s = 0;
  double requests_per_s = 0;
  double refused_per_s = 0, late_per_s = 0;  // RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED
  LatencyFigures latency;                    // from the intended send
  std::array<double, kPhases> phase_mean_ms = {};
  std::vector<FileBucket> histogram;  // of `latency`
  std::vector<FileWindow> windows;
  bool judged = false;  // whether the run had a stability rule
  bool stable = false;
};

struct LoadFile {
  std::string name;                                          // the file's
  std::vector<std::pair<std::string, std::string>> setting;  // settings that comparable runs share
  std::string shapes;
  std::vector<FileStep> steps;

  const std::string& Setting(const std::string& key) const;  // empty if missing
};

// INVALID_ARGUMENT, with `name` and the field: the text is not LoadJson's.
Result<LoadFile> ParseLoadFile(const std::string& name, const std::string& text);
Result<LoadFile> ReadLoadFile(const std::string& path);

}  // namespace attend::client
