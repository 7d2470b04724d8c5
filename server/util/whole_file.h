// SPDX-License-Identifier: Apache-2.0
//
// A small file that others wait for: it appears whole or not at all.

#pragma once

#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// Puts a file with these bytes at `path`, in place of what was there. It is written beside it under
// a name that nobody else has, which is not followed if it is a link. Errors name `what`.
Status WriteWholeFile(std::string_view what, const std::string& path, std::string_view bytes);

// An error if no file can appear at `path` for want of its folder. Errors name `what`.
Status CheckFolderOf(std::string_view what, const std::string& path);

}  // namespace attend
