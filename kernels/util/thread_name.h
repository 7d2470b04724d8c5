// SPDX-License-Identifier: Apache-2.0
//
// Names of threads, for top -H, perf and debuggers.

#pragma once

#include <sys/prctl.h>

#include <cstddef>

namespace attend {

// Names this thread. Linux keeps 15 bytes.
template <size_t N>
void NameThread(const char (&name)[N]) {
  static_assert(N <= 16, "Linux cuts longer names");
  (void)prctl(PR_SET_NAME, name);
}

}  // namespace attend
