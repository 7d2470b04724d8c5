// SPDX-License-Identifier: Apache-2.0
//
// The common part of all result files.

#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "client/load/load_options.h"

namespace attend::client {

// "schema" and the facts about the run.
nlohmann::ordered_json FactsJson(const std::string& schema, const RunFacts& facts);
nlohmann::ordered_json ShapeJson(const CallSpec& spec);

// Indented, with a final newline. Invalid UTF-8 is replaced.
std::string JsonText(const nlohmann::ordered_json& json);

}  // namespace attend::client
