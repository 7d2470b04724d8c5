// SPDX-License-Identifier: Apache-2.0
//
// The flags of `attend-client load`, and the shape flags, which other commands share.

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
// Adds --shape, --mix and --backward.
void AddShape(CLI::App* command, ShapeFlags* flags);
// The shapes of these flags; one small shape by default.
Status ReadShapes(const ShapeFlags& flags, std::vector<CallSpec>* mix);

struct LoadFlags {
  LoadOptions load;
  TransportOptions transport;
  ShapeFlags shapes;
  std::string concurrency, rates, sessions;  // for ParseValues
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
// Checks the flags and fills in `load`, `steps` and `session_counts`.
Status FinishLoadFlags(LoadFlags* flags, const CommonOptions& common);

}  // namespace attend::client
