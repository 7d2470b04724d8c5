// SPDX-License-Identifier: Apache-2.0
//
// Drives AttendStream with ready-made bytes: one stream a client, a fixed number of requests in
// flight on each.

#pragma once

#include <memory>

#include "tests/bench/service/call_driver.h"

namespace attend::bench {

// Streams `work`, which is admitted, for `seconds`; then waits for what is unanswered. The first
// failure or wrong answer is the error.
Result<Sample> DriveStreams(Connections& connections, const std::shared_ptr<const Work>& work,
                            int clients, int in_flight, double seconds);

}  // namespace attend::bench
