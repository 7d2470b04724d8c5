// SPDX-License-Identifier: Apache-2.0
//
// A library to preload, which makes chosen system calls of the process fail. Calls are counted by
// kind in a file that the test maps too ($ATTEND_TEST_CALLS, see tests/e2e/system_calls.py), so
// that the test can choose the N-th call from now at any time. It can also offset the real-time
// clock. Linux and glibc only.

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>

#define ATTEND_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* data, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace {

// In the order of KINDS in system_calls.py.
enum Kind { kAllocate, kAccept, kRead, kWrite, kMap, kOpen, kThread, kDescriptor, kPoll, kKinds };

constexpr size_t kFramesMost = 24;
constexpr size_t kFrameBytes = 160;

// State of one kind. With zeros, no call fails.
struct Calls {
  std::atomic<uint64_t> made;
  std::atomic<uint64_t> first;  // the N-th call fails if first <= N < end, counted from 1
  std::atomic<uint64_t> end;
  std::atomic<uint64_t> failed;
  std::atomic<int64_t> error;
  char where[kFramesMost][kFrameBytes];  // stack of the last call that failed
};

struct Control {
  std::atomic<int64_t> clock_offset_ns;
  Calls kinds[kKinds];
};

std::atomic<Control*> control{nullptr};
// The initial-exec model does not allocate, so that malloc may read this.
thread_local bool inside __attribute__((tls_model("initial-exec"))) = false;

template <typename Function>
Function* Next(const char* name) {
  const bool before = inside;
  inside = true;
  auto* const found = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
  inside = before;
  if (found == nullptr) abort();
  return found;
}

template <typename... Args>
long Kernel(long number, Args... args) {
  static const auto next = Next<long(long, ...)>("syscall");
  return next(number, args...);
}

void NoteWhere(Calls& calls) {
  void* frames[kFramesMost + 2] = {};
  const int count = backtrace(frames, std::size(frames));
  for (int i = 2; i < count; ++i) {
    Dl_info about = {};
    dladdr(frames[i], &about);
    const uintptr_t offset =
        reinterpret_cast<uintptr_t>(frames[i]) - reinterpret_cast<uintptr_t>(about.dli_fbase);
    snprintf(calls.where[i - 2], kFrameBytes, "%s+0x%zx %s",
             about.dli_fname == nullptr ? "?" : about.dli_fname, offset,
             about.dli_sname == nullptr ? "" : about.dli_sname);
  }
}

// Counts a call. True if it has to fail; errno is then set.
bool Fails(Kind kind) {
  Control* const shared = control.load(std::memory_order_acquire);
  if (shared == nullptr || inside) return false;
  Calls& calls = shared->kinds[kind];
  const uint64_t number = calls.made.fetch_add(1, std::memory_order_relaxed) + 1;
  if (number < calls.first.load(std::memory_order_relaxed) ||
      number >= calls.end.load(std::memory_order_relaxed)) {
    return false;
  }
  inside = true;
  NoteWhere(calls);
  calls.failed.fetch_add(1, std::memory_order_relaxed);
  inside = false;
  errno = static_cast<int>(calls.error.load(std::memory_order_relaxed));
  return true;
}

// Makes the system call with these arguments, unless it has to fail.
template <typename... Args>
long Forward(Kind kind, long number, Args... args) {
  return Fails(kind) ? -1 : Kernel(number, args...);
}

// The same for a call that reads from or writes to `file`. As in a real reset, the connection stays
// unusable: otherwise the peer would mistake the bytes after the lost ones for them.
bool FailsAt(Kind kind, long file) {
  if (!Fails(kind)) return false;
  const int error = errno;
  if (error == ECONNRESET) Kernel(SYS_shutdown, file, SHUT_RDWR);
  errno = error;
  return true;
}
template <typename... Args>
long ForwardAt(Kind kind, long number, int file, Args... args) {
  return FailsAt(kind, file) ? -1 : Kernel(number, file, args...);
}

int64_t ClockOffset() {
  const Control* const shared = control.load(std::memory_order_acquire);
  return shared == nullptr ? 0 : shared->clock_offset_ns.load(std::memory_order_relaxed);
}

timespec Moved(const timespec& time, int64_t ns) {
  constexpr int64_t kSecond = 1'000'000'000;
  const int64_t all = int64_t{time.tv_sec} * kSecond + time.tv_nsec + ns;
  const int64_t rest = (all % kSecond + kSecond) % kSecond;
  return {static_cast<time_t>((all - rest) / kSecond), rest};
}

// The kernel's clock has no offset, so absolute timeouts are converted back to it.
long Futex(long word, long operation, long value, long until, long other, long bits) {
  const auto* const time = reinterpret_cast<const timespec*>(until);
  const int64_t offset = ClockOffset();
  if (offset == 0 || time == nullptr || (operation & FUTEX_CLOCK_REALTIME) == 0 ||
      (operation & FUTEX_CMD_MASK) != FUTEX_WAIT_BITSET) {
    return Kernel(SYS_futex, word, operation, value, until, other, bits);
  }
  const timespec moved = Moved(*time, -offset);
  return Kernel(SYS_futex, word, operation, value, reinterpret_cast<long>(&moved), other, bits);
}

__attribute__((constructor)) void Begin() {
  const char* const path = getenv("ATTEND_TEST_CALLS");
  if (path == nullptr) return;
  void* frame = nullptr;
  backtrace(&frame, 1);  // the first call loads libgcc, which allocates
  const long file = Kernel(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
  if (file < 0) abort();
  void* const mapped = reinterpret_cast<void*>(
      Kernel(SYS_mmap, 0, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  if (mapped == MAP_FAILED) abort();
  Kernel(SYS_close, file);
  control.store(static_cast<Control*>(mapped), std::memory_order_release);
}

}  // namespace

// Memory.

ATTEND_EXPORT void* malloc(size_t bytes) {
  return Fails(kAllocate) ? nullptr : __libc_malloc(bytes);
}
ATTEND_EXPORT void* calloc(size_t count, size_t bytes) {
  return Fails(kAllocate) ? nullptr : __libc_calloc(count, bytes);
}
ATTEND_EXPORT void* realloc(void* data, size_t bytes) {
  return Fails(kAllocate) ? nullptr : __libc_realloc(data, bytes);
}
ATTEND_EXPORT void* memalign(size_t alignment, size_t bytes) {
  return Fails(kAllocate) ? nullptr : __libc_memalign(alignment, bytes);
}
ATTEND_EXPORT void* aligned_alloc(size_t alignment, size_t bytes) {
  return memalign(alignment, bytes);
}
ATTEND_EXPORT int posix_memalign(void** data, size_t alignment, size_t bytes) {
  void* const made = memalign(alignment, bytes);
  if (made != nullptr) *data = made;
  return made == nullptr ? ENOMEM : 0;
}
ATTEND_EXPORT void* mmap(void* at, size_t bytes, int access, int flags, int fd, off_t offset) {
  if (Fails(kMap)) return MAP_FAILED;
  return reinterpret_cast<void*>(Kernel(SYS_mmap, at, bytes, access, flags, fd, offset));
}
ATTEND_EXPORT void* mmap64(void* at, size_t bytes, int access, int flags, int fd, off_t offset) {
  return mmap(at, bytes, access, flags, fd, offset);
}

// Descriptors.

ATTEND_EXPORT int accept4(int socket, sockaddr* peer, socklen_t* size, int flags) {
  return static_cast<int>(Forward(kAccept, SYS_accept4, socket, peer, size, flags));
}
ATTEND_EXPORT int accept(int socket, sockaddr* peer, socklen_t* size) {
  return accept4(socket, peer, size, 0);
}
ATTEND_EXPORT int openat(int folder, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  return static_cast<int>(Forward(kOpen, SYS_openat, folder, path, flags, mode));
}
ATTEND_EXPORT int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  return openat(AT_FDCWD, path, flags, mode);
}
ATTEND_EXPORT int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  return openat(AT_FDCWD, path, flags, mode);
}
ATTEND_EXPORT FILE* fopen(const char* path, const char* mode) {
  static const auto next = Next<FILE*(const char*, const char*)>("fopen");
  return Fails(kOpen) ? nullptr : next(path, mode);
}
ATTEND_EXPORT FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }
ATTEND_EXPORT int memfd_create(const char* name, unsigned flags) noexcept {
  return static_cast<int>(Forward(kOpen, SYS_memfd_create, name, flags));
}
ATTEND_EXPORT int socket(int domain, int type, int protocol) noexcept {
  return static_cast<int>(Forward(kDescriptor, SYS_socket, domain, type, protocol));
}
ATTEND_EXPORT int eventfd(unsigned value, int flags) noexcept {
  return static_cast<int>(Forward(kDescriptor, SYS_eventfd2, value, flags));
}
ATTEND_EXPORT int epoll_create1(int flags) noexcept {
  return static_cast<int>(Forward(kDescriptor, SYS_epoll_create1, flags));
}

// Bytes.

ATTEND_EXPORT ssize_t read(int fd, void* data, size_t bytes) {
  return ForwardAt(kRead, SYS_read, fd, data, bytes);
}
ATTEND_EXPORT ssize_t readv(int fd, const iovec* parts, int count) {
  return ForwardAt(kRead, SYS_readv, fd, parts, count);
}
ATTEND_EXPORT ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  return ForwardAt(kRead, SYS_recvfrom, fd, data, bytes, flags, 0, 0);
}
ATTEND_EXPORT ssize_t recvmsg(int fd, msghdr* message, int flags) {
  return ForwardAt(kRead, SYS_recvmsg, fd, message, flags);
}
ATTEND_EXPORT ssize_t write(int fd, const void* data, size_t bytes) {
  return ForwardAt(kWrite, SYS_write, fd, data, bytes);
}
ATTEND_EXPORT ssize_t writev(int fd, const iovec* parts, int count) {
  return ForwardAt(kWrite, SYS_writev, fd, parts, count);
}
ATTEND_EXPORT ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  return ForwardAt(kWrite, SYS_sendto, fd, data, bytes, flags, 0, 0);
}
ATTEND_EXPORT ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  return ForwardAt(kWrite, SYS_sendmsg, fd, message, flags);
}
ATTEND_EXPORT int epoll_ctl(int set, int operation, int fd, epoll_event* event) noexcept {
  return static_cast<int>(Forward(kPoll, SYS_epoll_ctl, set, operation, fd, event));
}
ATTEND_EXPORT int epoll_wait(int set, epoll_event* events, int count, int timeout_ms) {
  return static_cast<int>(Forward(kPoll, SYS_epoll_wait, set, events, count, timeout_ms));
}
ATTEND_EXPORT int poll(pollfd* fds, nfds_t count, int timeout_ms) {
  return static_cast<int>(Forward(kPoll, SYS_poll, fds, count, timeout_ms));
}

// The server's recvmsg and sendmsg wrappers and absl's locks use syscall().
ATTEND_EXPORT long syscall(long number, ...) noexcept {
  long a[6];
  va_list rest;
  va_start(rest, number);
  for (long& each : a) each = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_futex) return Futex(a[0], a[1], a[2], a[3], a[4], a[5]);
  if ((number == SYS_recvmsg && FailsAt(kRead, a[0])) ||
      (number == SYS_sendmsg && FailsAt(kWrite, a[0])) ||
      (number == SYS_memfd_create && Fails(kOpen))) {
    return -1;
  }
  return Kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

// Threads and time.

ATTEND_EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                                 void* (*run)(void*), void* argument) noexcept {
  using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto next = Next<Create>("pthread_create");
  return Fails(kThread) ? errno : next(thread, attributes, run, argument);
}

ATTEND_EXPORT int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto next = Next<int(clockid_t, timespec*)>("clock_gettime");
  const int result = next(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    *time = Moved(*time, ClockOffset());
  }
  return result;
}
ATTEND_EXPORT int gettimeofday(timeval* time, void*) noexcept {
  timespec now;
  const int result = clock_gettime(CLOCK_REALTIME, &now);
  if (result == 0) *time = {now.tv_sec, now.tv_nsec / 1000};
  return result;
}
ATTEND_EXPORT time_t time(time_t* out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}
