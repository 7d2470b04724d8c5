// SPDX-License-Identifier: Apache-2.0

#include "proto/process/process_settings.h"

#include <absl/synchronization/mutex.h>

#include <cassert>
#include <cstdlib>  // __GLIBC__

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace attend {

bool TuneAllocator([[maybe_unused]] int arenas) {
  assert(arenas >= 1);
#if defined(__GLIBC__)
  bool ok = true;
  ok &= mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1;
  ok &= mallopt(M_TRIM_THRESHOLD, -1) == 1;  // never
  ok &= mallopt(M_TOP_PAD, 64 << 20) == 1;
  ok &= mallopt(M_ARENA_MAX, arenas) == 1;
  return ok;
#else
  return false;
#endif
}

void SkipDeadlockSearch() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

}  // namespace attend
