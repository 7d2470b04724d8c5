// SPDX-License-Identifier: Apache-2.0
//
// A mutex for locks that are held for less time than a wake-up takes.

#pragma once

#include <pthread.h>

#include <mutex>

namespace attend {

// Spins for a moment before it sleeps, where the C library knows how to: a thread that sleeps for a
// lock that was held for 1 us is late by the tens of microseconds that an idle core takes to wake.
class AdaptiveMutex : public std::mutex {
 public:
  AdaptiveMutex() {
#if defined(__GLIBC__)
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(native_handle(), &kind);
    pthread_mutexattr_destroy(&kind);
#endif
  }
};

}  // namespace attend
