// SPDX-License-Identifier: Apache-2.0
//
// Drives AttendChunked through the client library, one call at a time over several connections.

#pragma once

#include <memory>
#include <string>

#include "client/client.h"
#include "tests/bench/service/rounds.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

Result<std::unique_ptr<client::Client>> ConnectChunked(const std::string& target, int connections);

// One call whose answer is judged in full.
Status CheckChunked(client::Client& client, const Work& work);
// Calls for `seconds`, at least one; answers are dropped as they come. The first failure is the
// error.
Result<Sample> DriveChunked(client::Client& client, const Work& work, double seconds);

}  // namespace attend::bench
