// SPDX-License-Identifier: Apache-2.0
//
// Drives AttendStream with ready-made bytes: one stream a client, a fixed number of requests in
// flight on each.

#pragma once

#include <string>
#include <vector>

#include "tests/bench/service/call_driver.h"

namespace attend::bench {

// The request_id of whatever a client sends as the one of its requests in flight with this number.
std::string StreamId(int slot);

// A client's requests: a script for each that it has in flight, with their ids.
using StreamScripts = std::vector<Script>;
// `work`, admitted, `in_flight` times.
StreamScripts StreamScriptsOf(const std::shared_ptr<const Work>& work, int in_flight);

// `clients` streams in turn over the connections and `scripts`, for `seconds`; then waits for what
// is unanswered. The first failure or wrong answer is the error.
Result<Sample> DriveStreams(Connections& connections, const std::vector<StreamScripts>& scripts,
                            int clients, double seconds);

}  // namespace attend::bench
