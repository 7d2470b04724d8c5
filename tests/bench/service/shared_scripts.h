// SPDX-License-Identifier: Apache-2.0
//
// Calls whose inputs and answers are in memory that is shared with a server.

#pragma once

#include <memory>
#include <vector>

#include "client/memory/shared_memory.h"
#include "tests/bench/service/call_driver.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

// The scripts of one client, in a new region: one for each request in flight, with a stream's ids
// (stream_driver.h), each with all `works`, which must be admitted. A script's answers all go to
// the same place, so that it is for one caller with one call in flight.
Result<std::vector<Script>> ShareScripts(client::SharedMemory& memory,
                                         const std::vector<std::shared_ptr<Work>>& works,
                                         int in_flight);

}  // namespace attend::bench
