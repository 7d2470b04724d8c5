// SPDX-License-Identifier: Apache-2.0
//
// The flags of `attend-client load`, and those for shapes, which other commands take too.

#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "client/cli/commands.h"
#include "client/load/load_options.h"

namespace attend::client {

struct ShapeFlags {
  std::vector<std::string> shapes;
  std::string mix;
  bool backward = false;
};
// --shape, --mix and --backward.
void AddShape(CLI::App* command, ShapeFlags* flags);
// What they ask for; one small shape if none is given.
Status ReadShapes(const ShapeFlags& flags, std::vector<CallSpec>* mix);

struct LoadFlags {
  LoadOptions load;
  TransportOptions transport;
  ShapeFlags shapes;
  std::string concurrency, rates, sessions;  // as ParseValues takes them
  std::vector<LoadStep> steps;
  std::vector<int64_t> session_counts;
  std::string arrivals = "poisson";
  std::vector<std::string> allow;
  bool until_stable = false;
  StabilityRule stability;
  double search_p99_ms = 0;
  double search_precision = 0.05;
  std::string json, plot;
};
void AddLoadFlags(CLI::App* command, LoadFlags* flags);
// Checks what was given and fills in `load`, `steps` and `session_counts`.
Status FinishLoadFlags(LoadFlags* flags, const CommonOptions& common);

}  // namespace attend::client
