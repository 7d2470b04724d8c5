// SPDX-License-Identifier: Apache-2.0
//
// The clock of measurements. It is not replaceable, because real time is measured.

#pragma once

#include <chrono>
#include <cstdint>

namespace attend::client {

using Clock = std::chrono::steady_clock;

inline int64_t NowNs() { return Clock::now().time_since_epoch().count(); }

}  // namespace attend::client
