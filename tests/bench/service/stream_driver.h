// SPDX-License-Identifier: Apache-2.0
//
// Calls AttendStream with prepared messages: a stream per client, with a fixed number of requests
// in flight on each.

#pragma once

#include <string>
#include <vector>

#include "tests/bench/service/call_driver.h"

namespace attend::bench {

// The request_id of a client's requests in this slot, one of which is in flight at a time.
std::string StreamId(int slot);

// A client's requests: a script for each slot, with its id.
using StreamScripts = std::vector<Script>;
// Scripts of `work`, which must be admitted, for `in_flight` slots.
StreamScripts StreamScriptsOf(const std::shared_ptr<const Work>& work, int in_flight);

// Runs `clients` streams for `seconds`, assigned to the connections and `scripts` in turn; then
// waits for unanswered requests. The first failure or wrong answer is the error.
Result<Sample> DriveStreams(Connections& connections, const std::vector<StreamScripts>& scripts,
                            int clients, double seconds);

}  // namespace attend::bench
