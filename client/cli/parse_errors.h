// SPDX-License-Identifier: Apache-2.0
//
// Describes in one line why a command line is wrong.

#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace attend::client {

std::string DescribeParseError(const CLI::App& app, const CLI::ParseError& error);

// The name that was probably meant by `word`; empty if none is close.
std::string Nearest(const std::string& word, const std::vector<std::string>& names);

}  // namespace attend::client
