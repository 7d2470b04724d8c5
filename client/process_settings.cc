// SPDX-License-Identifier: Apache-2.0

#include "client/process_settings.h"

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace attend::client {

void TuneAllocator() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, -1);  // never
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_ARENA_MAX, 1);
#endif
}

}  // namespace attend::client
