// SPDX-License-Identifier: Apache-2.0
//
// The token by which a client says who it is. Whoever reads it can do what the client can, so it is
// never in an error, and goes nowhere without TLS but on this host.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr char kTokenVariable[] = "ATTEND_TOKEN";

// `given`, or what the environment's ATTEND_TOKEN has if that is empty; empty: there is none.
// INVALID_ARGUMENT: it cannot be a token.
Result<std::string> TokenOf(const std::string& given);

// Whether what is sent to the target, as ServerTarget gives it, stays on this host: its address is
// of loopback, "localhost", or a Unix socket.
bool IsOnThisHost(const std::string& target);

// INVALID_ARGUMENT: the token would go to the target in the clear.
Status CheckTokenStays(const std::string& token, const std::string& target);

// The first line of a file: a token. INVALID_ARGUMENT names the file.
Result<std::string> ReadTokenFile(const std::string& path);

}  // namespace attend::client
