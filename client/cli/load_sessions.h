// SPDX-License-Identifier: Apache-2.0
//
// `attend-client load --sessions`: its flags and what it prints.

#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <string>

#include "client/load/load_options.h"

namespace attend::client {

// --sessions and what goes with it. Call when the command has its other flags.
void AddSessionLoad(CLI::App* command, SessionLoad* load);

// Runs the load, prints the table and writes the JSON, if `json` names a file. Returns the exit
// code.
int LoadSessions(const LoadOptions& options, const std::string& json,
                 const std::atomic<bool>& interrupted);

}  // namespace attend::client
