// SPDX-License-Identifier: Apache-2.0
//
// How much a call of each method may bring before its connection is ended. gRPC reads a unary
// call's message whole before the method sees it, and would read gigabytes for a method that takes
// 4 KiB.

#pragma once

#include <vector>

#include "server/app/config.h"
#include "server/net/method_headers.h"

namespace attend {

// Of all methods that the server may have. Those that are not here have streams of requests.
std::vector<MethodBound> MethodBounds(const Config& config);

}  // namespace attend
