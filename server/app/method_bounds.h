// SPDX-License-Identifier: Apache-2.0
//
// How much a call of each method, and each of its messages, may bring before its connection is
// ended. gRPC reads a message whole before the method sees it, and would read gigabytes for a
// method that takes 4 KiB.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "server/app/config.h"
#include "server/net/method_headers.h"

namespace attend {

// Of all methods that the server may have.
std::vector<MethodBound> MethodBounds(const Config& config);
// The most bytes of one message, by path.
std::map<std::string, int64_t, std::less<>> MessageBounds(const Config& config);

}  // namespace attend
