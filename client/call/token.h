// SPDX-License-Identifier: Apache-2.0
//
// The token that authenticates a client. Anyone who reads it can act as the client, so it never
// appears in an error and leaves this host only over TLS.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr char kTokenVariable[] = "ATTEND_TOKEN";

// `given` or, if that is empty, the environment's ATTEND_TOKEN; empty if there is none.
// INVALID_ARGUMENT: not a valid token.
Result<std::string> TokenOf(const std::string& given);

// Whether the target, in ServerTarget's form, is on this host: loopback addresses only,
// "localhost", or a Unix socket.
bool IsOnThisHost(const std::string& target);

// INVALID_ARGUMENT: the token would be sent to the target in the clear.
Status CheckTokenStays(const std::string& token, const std::string& target);

// Reads a token from a file's first line. INVALID_ARGUMENT names the file.
Result<std::string> ReadTokenFile(const std::string& path);

}  // namespace attend::client
