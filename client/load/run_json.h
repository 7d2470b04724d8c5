// SPDX-License-Identifier: Apache-2.0
//
// What all files of results have in common.

#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "client/load/load_options.h"

namespace attend::client {

// "schema" and what says how the file was made.
nlohmann::ordered_json FactsJson(const std::string& schema, const RunFacts& facts);
nlohmann::ordered_json ShapeJson(const CallSpec& spec);

// Pretty, with a newline at its end. What is no UTF-8 is replaced.
std::string JsonText(const nlohmann::ordered_json& json);

}  // namespace attend::client
