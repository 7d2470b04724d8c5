// SPDX-License-Identifier: Apache-2.0
//
// Writes a small file that appears whole or not at all, for readers that wait for it.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// Puts a file with these bytes at `path`, replacing what was there. It is first written beside it
// under a unique name, which is not followed if it is a link. Errors name `what`.
Status WriteWholeFile(std::string_view what, const std::string& path, std::string_view bytes);

// An error if `path` cannot be written because its folder is missing. Errors name `what`.
Status CheckFolderOf(std::string_view what, const std::string& path);

}  // namespace attend
