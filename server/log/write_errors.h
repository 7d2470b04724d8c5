// SPDX-License-Identifier: Apache-2.0
//
// Counts what a log file did not take.

#pragma once

#include <cstdint>

#include "server/log/logging.h"

namespace attend {

// Times that --log-file did not take what was written, for instance because its disk is full; what
// was to be written then is lost. Thread-safe.
int64_t CountWriteErrors(const Logger& logger);

}  // namespace attend
