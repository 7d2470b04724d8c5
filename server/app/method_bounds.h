// SPDX-License-Identifier: Apache-2.0
//
// How long the messages of each method may be. A longer one is refused by its length, before any of
// it is kept.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "server/app/config.h"

namespace attend {

// The most bytes of one message, by path, of all methods that the server may have.
std::map<std::string, int64_t, std::less<>> MessageBounds(const Config& config);

}  // namespace attend
