// SPDX-License-Identifier: Apache-2.0
//
// What figures depend on beside the code, and files of them.

#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "kernels/util/status.h"

namespace attend::bench {

// `device`: the first that the server has, "cpu" or "cuda:N".
nlohmann::ordered_json Machine(const std::string& device);
// On one line.
std::string MachineText(const nlohmann::ordered_json& machine);

Status WriteJson(const std::string& path, const nlohmann::ordered_json& json);

}  // namespace attend::bench
