// SPDX-License-Identifier: Apache-2.0
//
// One call at a time from one thread that waits for it, for latency.

#pragma once

#include "tests/bench/service/call_driver.h"

namespace attend::bench {

// The sample's percentiles are of each call's latency; with `less_own_work` less what its answer
// says that copies and kernels took.
Result<Sample> DriveLatency(Connections& connections, const PreparedCall& call, bool less_own_work,
                            double seconds);

}  // namespace attend::bench
