// SPDX-License-Identifier: Apache-2.0
//
// A mutex for locks that are held for less time than a wake-up takes.

#pragma once

#include <pthread.h>

#include <mutex>

namespace attend {

// Spins for a moment before it sleeps, where the C library knows how to: a thread that sleeps for a
// lock that was held for 1 us is late by the tens of microseconds that an idle core takes to wake.
// Still a std::mutex for whoever waits on a condition with it. glibc's kinds of mutex differ in
// their initial bytes alone, which are assigned before anybody else knows of this one.
class AdaptiveMutex : public std::mutex {
 public:
  AdaptiveMutex() {
#if defined(PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP)
    *native_handle() = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
#endif
  }
};

}  // namespace attend
