// SPDX-License-Identifier: Apache-2.0
//
// Calls whose inputs and answers lie in memory that is shared with a server.

#pragma once

#include <memory>
#include <vector>

#include "client/memory/shared_memory.h"
#include "tests/bench/service/call_driver.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

// One client's, in a region of its own: a script for each request that it has in flight, with the
// ids of a stream's (stream_driver.h), each of all `works`, which are admitted. A script's answers
// all go to one place, which no other script has: it is for one caller, with one call in flight.
Result<std::vector<Script>> ShareScripts(client::SharedMemory& memory,
                                         const std::vector<std::shared_ptr<Work>>& works,
                                         int in_flight);

}  // namespace attend::bench
