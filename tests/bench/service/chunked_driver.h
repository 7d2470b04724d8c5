// SPDX-License-Identifier: Apache-2.0
//
// Calls AttendChunked through the client library, one call at a time over several connections.

#pragma once

#include <memory>
#include <string>

#include "client/client.h"
#include "tests/bench/service/rounds.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

Result<std::unique_ptr<client::Client>> ConnectChunked(const std::string& target, int connections);

// Makes one call and checks its answer in full.
Status CheckChunked(client::Client& client, const Work& work);
// Makes calls for `seconds`, at least one; answers are discarded. The first failure is the error.
Result<Sample> DriveChunked(client::Client& client, const Work& work, double seconds);

}  // namespace attend::bench
