// SPDX-License-Identifier: Apache-2.0
//
// Settings as attend-server parses them.

#pragma once

#include <string>
#include <vector>

#include "server/app/config.h"

namespace attend::test {

struct ParsedConfig {
  ConfigOutcome outcome;
  Config config;
  std::string text;  // what is printed
};

inline ParsedConfig ParseFlags(const std::vector<std::string>& flags) {
  std::vector<const char*> arguments = {"attend-server"};
  for (const std::string& flag : flags) arguments.push_back(flag.c_str());
  ParsedConfig parsed;
  parsed.outcome =
      ParseConfig(static_cast<int>(arguments.size()), arguments.data(), parsed.config, parsed.text);
  return parsed;
}

}  // namespace attend::test
