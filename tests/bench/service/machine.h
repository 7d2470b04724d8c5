// SPDX-License-Identifier: Apache-2.0
//
// Describes the machine, for figures and files of figures.

#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "kernels/util/status.h"

namespace attend::bench {

// `device`: the first device of the server, "cpu" or "cuda:N".
nlohmann::ordered_json Machine(const std::string& device);
// The description on one line.
std::string MachineText(const nlohmann::ordered_json& machine);

Status WriteJson(const std::string& path, const nlohmann::ordered_json& json);

}  // namespace attend::bench
