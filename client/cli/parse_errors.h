// SPDX-License-Identifier: Apache-2.0
//
// Why a command line is wrong, in one line.

#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::client {

std::string DescribeParseError(const CLI::App& app, const CLI::ParseError& error);

// Refuses texts that the parser takes for another number: -1 and 2^64 for unsigned ones, what only
// rounding makes 0, which often means off, and NaN within a range.
Status CheckNumbers(const CLI::App& app);

// The name that was probably meant by `word`; empty if none is close.
std::string Nearest(const std::string& word, const std::vector<std::string>& names);

}  // namespace attend::client
