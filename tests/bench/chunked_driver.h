// SPDX-License-Identifier: Apache-2.0
//
// Drives AttendChunked through the client library, one call at a time over several connections.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "attend/v1/attention.pb.h"
#include "tests/bench/call_driver.h"

namespace attend::bench {

// Whether these first bytes of O are right.
using VerifyOutput = std::function<bool(const char* o)>;

// Calls for `seconds`; answers are dropped as they come, but for the first, which is verified.
using ChunkedDriver = std::function<DriveResult(double seconds)>;
// Connects at the first drive.
ChunkedDriver MakeChunkedDriver(const std::string& target, int connections,
                                std::shared_ptr<const v1::AttendRequest> request,
                                VerifyOutput verify);

}  // namespace attend::bench
