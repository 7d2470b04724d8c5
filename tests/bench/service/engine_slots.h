// SPDX-License-Identifier: Apache-2.0
//
// The server's engine in this process, without gRPC: requests in its host memory, submitted by the
// threads that wait for their answers.

#pragma once

#include <memory>
#include <string>

#include "kernels/util/status.h"
#include "tests/bench/service/answer_slots.h"
#include "tests/bench/service/work.h"

namespace attend::bench {

// Starts an engine on `devices` (as for attend-server's --device) that lives as long as the slots,
// whose requests and answers are in the engine's memory. `count` devices must take part. `work`
// must outlive the slots.
Result<std::unique_ptr<AnswerSlots>> MakeEngineSlots(const std::string& devices, int count,
                                                     const Work& work, int slots);

}  // namespace attend::bench
