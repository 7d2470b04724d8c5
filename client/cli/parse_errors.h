// SPDX-License-Identifier: Apache-2.0
//
// Says in one line why a command line is wrong.

#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace attend::client {

std::string DescribeParseError(const CLI::App& app, const CLI::ParseError& error);

// The name that `word` was probably meant to be; empty if none is near.
std::string Nearest(const std::string& word, const std::vector<std::string>& names);

}  // namespace attend::client
