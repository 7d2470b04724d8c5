// SPDX-License-Identifier: Apache-2.0
//
// `attend-client load --sessions`: its flags and its output.

#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <string>

#include "client/cli/load_flags.h"

namespace attend::client {

// Adds --sessions and its companions. Must be called after the command's other flags were added.
void AddSessionLoad(CLI::App* command, std::string* sessions, SessionLoad* load);

// Runs one load per number of sessions, prints the tables and writes the files. Returns the exit
// code.
int LoadSessions(const LoadFlags& flags, const std::atomic<bool>& interrupted);

}  // namespace attend::client
