// SPDX-License-Identifier: Apache-2.0
//
// The last lines of a process that ends, and protection from writes that would kill it: with
// SIGPIPE and SIGXFSZ ignored, a failed write is an error of that write only.

#pragma once

#include <string_view>

#include "server/log/logging.h"

namespace attend {

// Call it first in main. Ignores SIGPIPE and SIGXFSZ. Opens /dev/null for closed standard streams,
// whose descriptors the log file or a socket would get otherwise.
void PrepareWrites();

// Writes a line, given without its newline, to stderr; gives up if it cannot be written for 0.5 s.
void WriteLastLine(std::string_view line);

// After this, crash signals (abort included) wait up to a second for the log's thread to write what
// was logged, then end the process as before. Null undoes it. `logger` must live until then.
void WriteLogOnCrash(const Logger* logger);

}  // namespace attend
