// SPDX-License-Identifier: Apache-2.0
//
// Unguessable tokens. Thread-safe.

#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

inline constexpr int kTokenBytes = 16;

// Generates tokens.
using TokenSource = std::function<Result<std::string>()>;
// 128 random bits from the operating system.
Result<std::string> RandomToken();

// The bytes in hexadecimal, two digits each.
std::string HexText(std::string_view bytes);

}  // namespace attend
