// SPDX-License-Identifier: Apache-2.0
//
// Names of threads, for top -H, perf and debuggers.

#pragma once

#include <sys/prctl.h>

namespace attend {

// Names this thread. Linux keeps 15 bytes.
inline void NameThread(const char* name) { (void)prctl(PR_SET_NAME, name); }

}  // namespace attend
