// SPDX-License-Identifier: Apache-2.0
//
// Locks whose use Clang checks at compile time (-Wthread-safety): a member names the mutex that
// guards it, a function the one that its caller must hold. Other compilers ignore the annotations.
// Thin wrappers of the standard library's locks.

#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>

#if defined(__clang__)
#define ATTEND_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define ATTEND_THREAD_ATTRIBUTE(...)
#endif

// On a member: accessed only with the mutex held.
#define ATTEND_GUARDED_BY(mutex) ATTEND_THREAD_ATTRIBUTE(guarded_by(mutex))
// On a function: its caller holds the mutex (REQUIRES), or must not hold it (EXCLUDES).
#define ATTEND_REQUIRES(...) ATTEND_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ATTEND_EXCLUDES(...) ATTEND_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// On locks and their member functions.
#define ATTEND_LOCK ATTEND_THREAD_ATTRIBUTE(capability("mutex"))
#define ATTEND_SCOPED_LOCK ATTEND_THREAD_ATTRIBUTE(scoped_lockable)
#define ATTEND_ACQUIRE(...) ATTEND_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define ATTEND_ACQUIRE_SHARED(...) ATTEND_THREAD_ATTRIBUTE(acquire_shared_capability(__VA_ARGS__))
#define ATTEND_TRY_ACQUIRE(...) ATTEND_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define ATTEND_RELEASE(...) ATTEND_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))

namespace attend {

class ATTEND_LOCK Mutex {
 public:
  void Lock() ATTEND_ACQUIRE() { mutex_.lock(); }
  void Unlock() ATTEND_RELEASE() { mutex_.unlock(); }
  bool TryLock() ATTEND_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class CondVar;
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds the mutex until the end of its scope, except between Unlock and Lock.
class ATTEND_SCOPED_LOCK MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ATTEND_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  // Adopts a mutex that this thread already holds.
  MutexLock(Mutex& mutex, std::adopt_lock_t adopt) ATTEND_REQUIRES(mutex)
      : lock_(mutex.mutex_, adopt) {}
  ~MutexLock() ATTEND_RELEASE() {}

  void Unlock() ATTEND_RELEASE() { lock_.unlock(); }
  void Lock() ATTEND_ACQUIRE() { lock_.lock(); }

 private:
  std::unique_lock<std::mutex> lock_;
};

// Waiting releases the mutex until the wait ends. Wake-ups may be spurious, so wait in a loop that
// tests the condition.
class CondVar {
 public:
  void Wait(Mutex& mutex) ATTEND_REQUIRES(mutex) { changed_.wait(*Adopted(mutex)); }
  // Against the real clock; code that is given a Clock uses Clock::WaitUntil. False: it timed out.
  template <class TimePoint>
  bool WaitUntil(Mutex& mutex, const TimePoint& until) ATTEND_REQUIRES(mutex) {
    return changed_.wait_until(*Adopted(mutex), until) == std::cv_status::no_timeout;
  }
  void NotifyOne() { changed_.notify_one(); }
  void NotifyAll() { changed_.notify_all(); }

 private:
  // A std::unique_lock over the held mutex for one wait; it never unlocks, because the caller's
  // lock owns the mutex.
  class Adopted {
   public:
    explicit Adopted(Mutex& mutex) : lock_(mutex.mutex_, std::adopt_lock) {}
    ~Adopted() { lock_.release(); }
    std::unique_lock<std::mutex>& operator*() { return lock_; }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  std::condition_variable changed_;
};

// For data that is read much more often than written: many readers or one writer.
class ATTEND_LOCK SharedMutex {
 private:
  friend class ReaderLock;
  friend class WriterLock;
  std::shared_mutex mutex_;
};

class ATTEND_SCOPED_LOCK ReaderLock {
 public:
  explicit ReaderLock(SharedMutex& mutex) ATTEND_ACQUIRE_SHARED(mutex) : lock_(mutex.mutex_) {}
  ~ReaderLock() ATTEND_RELEASE() {}

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

class ATTEND_SCOPED_LOCK WriterLock {
 public:
  explicit WriterLock(SharedMutex& mutex) ATTEND_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~WriterLock() ATTEND_RELEASE() {}

 private:
  std::unique_lock<std::shared_mutex> lock_;
};

}  // namespace attend
