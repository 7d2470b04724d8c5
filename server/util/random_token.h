// SPDX-License-Identifier: Apache-2.0
//
// Unguessable names. Thread-safe.

#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

inline constexpr int kTokenBytes = 16;

// Makes tokens.
using TokenSource = std::function<Result<std::string>()>;
// 128 random bits from the operating system.
Result<std::string> RandomToken();

// Bytes as text, two digits each.
std::string HexText(std::string_view bytes);

}  // namespace attend
