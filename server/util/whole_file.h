// SPDX-License-Identifier: Apache-2.0
//
// Small files: read whole, or written so that they appear whole or not at all, for readers that
// wait for them.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// All bytes of a file, of which it may have `bytes_max`. INVALID_ARGUMENT names the path and what
// is wrong: it cannot be read, is no file, or is larger. Never waits for a writer.
Result<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max);

// Puts a file with these bytes at `path`, replacing what was there. It is first written beside it
// under a unique name, which is not followed if it is a link. Errors name `what`.
Status WriteWholeFile(std::string_view what, const std::string& path, std::string_view bytes);

// An error if `path` cannot be written because its folder is missing. Errors name `what`.
Status CheckFolderOf(std::string_view what, const std::string& path);

}  // namespace attend
