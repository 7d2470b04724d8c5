// SPDX-License-Identifier: Apache-2.0
//
// Names that whoever does not know them cannot guess. Thread-safe.

#pragma once

#include <functional>
#include <string>

#include "kernels/util/status.h"

namespace attend {

inline constexpr int kTokenBytes = 16;

// Makes tokens.
using TokenSource = std::function<Result<std::string>()>;
// 128 bits of the kernel's randomness.
Result<std::string> RandomToken();

}  // namespace attend
