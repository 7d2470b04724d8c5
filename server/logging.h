// SPDX-License-Identifier: Apache-2.0
//
// The server's log: one line a message, as text or JSON, to stderr or a file. Lines are safe to
// feed with a client's bytes: control characters are escaped in both forms.

#pragma once

#include <spdlog/logger.h>

#include <memory>
#include <string>

#include "kernels/status.h"
#include "server/config.h"

namespace attend {

// NOT_FOUND or so if the log file cannot be opened.
Result<std::shared_ptr<spdlog::logger>> MakeLogger(const Config& config);

// The escapes of a JSON string, without its quotes. Invalid UTF-8 becomes U+FFFD.
std::string EscapeJson(std::string_view text);

}  // namespace attend
