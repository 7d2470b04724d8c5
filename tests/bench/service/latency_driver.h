// SPDX-License-Identifier: Apache-2.0
//
// Measures latency: one call at a time from a thread that waits for it.

#pragma once

#include "tests/bench/service/call_driver.h"

namespace attend::bench {

// The sample's percentiles are those of the calls' latency; with `less_own_work`, without the time
// of copies and kernels that the answer states.
Result<Sample> DriveLatency(Connections& connections, const PreparedCall& call, bool less_own_work,
                            double seconds);

}  // namespace attend::bench
