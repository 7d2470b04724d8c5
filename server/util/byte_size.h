// SPDX-License-Identifier: Apache-2.0
//
// Human-readable byte counts: "64MiB", "1.5 GiB", "4096". Pure.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// Units B, KiB, MiB, GiB, TiB (also K, M, G, T, with or without B; any case), all powers of 1024.
Result<int64_t> ParseByteSize(std::string_view text);

// The shortest exact form: 65536 gives "64KiB".
std::string FormatByteSize(int64_t bytes);
// Rounded to three digits for display: 25276502016 gives "23.5GiB".
std::string RoundByteSize(int64_t bytes);

}  // namespace attend
