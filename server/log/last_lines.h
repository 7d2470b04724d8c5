// SPDX-License-Identifier: Apache-2.0
//
// The last lines of a process that ends, and protection from writes that would end it: a reader or
// a limit that refuses a write is an error of that write.

#pragma once

#include <string_view>

#include "server/log/logging.h"

namespace attend {

// Call first in main. Ignores SIGPIPE and SIGXFSZ, and opens /dev/null in place of standard streams
// that are closed, whose numbers the log's file or a socket would get.
void PrepareWrites();

// Writes a line, without its newline, to stderr, or loses it if the reader takes nothing for half a
// second.
void WriteLastLine(std::string_view line);

// From here on a signal of a crash, abort's among them, waits for up to a second until the log's
// thread has written what was logged, and then ends the process as before. Null: no longer.
// `logger` must live until then.
void WriteLogOnCrash(const Logger* logger);

}  // namespace attend
