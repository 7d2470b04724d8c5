// SPDX-License-Identifier: Apache-2.0
//
// Small files: read as a whole, or written atomically, for readers that wait for them.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// The contents of a file of at most `bytes_max`, and its `mode`. The error begins with the path:
// UNAVAILABLE if the system cannot read it now, INVALID_ARGUMENT if it is not a regular file or too
// large. Never waits for a writer.
Result<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max,
                                  mode_t* mode = nullptr);

// Atomically writes a file at `path`, replacing what was there. The data is first written next to
// it under a unique name, which is not followed if it is a link. Errors name `what`.
Status WriteWholeFile(std::string_view what, const std::string& path, std::string_view bytes);

// An error if `path` cannot be written because its folder is missing. Errors name `what`.
Status CheckFolderOf(std::string_view what, const std::string& path);

}  // namespace attend
