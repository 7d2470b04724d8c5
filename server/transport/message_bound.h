// SPDX-License-Identifier: Apache-2.0
//
// The maximum size of a method's messages, and its name in errors.

#pragma once

#include <cstdint>

namespace attend {

struct MessageBound {
  int64_t bytes = 0;
  const char* origin = "";  // a literal, such as "twice --max-request-bytes"; empty: a constant
};

}  // namespace attend
