// SPDX-License-Identifier: Apache-2.0
//
// Message size limits by method. A longer message is refused by its length prefix, before any of it
// is buffered.

#pragma once

#include <functional>
#include <map>
#include <string>

#include "server/app/config.h"
#include "server/transport/message_bound.h"

namespace attend {

// Maximum message bytes by method path, for all methods that the server may have.
std::map<std::string, MessageBound, std::less<>> MessageBounds(const Config& config);

}  // namespace attend
