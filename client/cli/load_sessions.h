// SPDX-License-Identifier: Apache-2.0
//
// `attend-client load --sessions`: its flags and what it prints.

#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <string>

#include "client/cli/load_flags.h"

namespace attend::client {

// --sessions and what goes with it. Call when the command has its other flags.
void AddSessionLoad(CLI::App* command, std::string* sessions, SessionLoad* load);

// Runs a load for each of the numbers of sessions, prints the tables and writes the files. Returns
// the exit code.
int LoadSessions(const LoadFlags& flags, const std::atomic<bool>& interrupted);

}  // namespace attend::client
