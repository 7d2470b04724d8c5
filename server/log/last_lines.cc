// SPDX-License-Identifier: Apache-2.0

#include "server/log/last_lines.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <string>

namespace attend {
namespace {

constexpr int kReaderMs = 500;
constexpr int kCrashWaits = 100;
constexpr timespec kCrashWait{0, 10'000'000};  // 10 ms

// Global, because a signal handler has no context.
std::atomic<const Logger*> crash_log{nullptr};

// Async-signal-safe: the log's thread writes, the handler only waits. If the crash left a lock held
// that the log needs, or is in the log's thread, the wait times out.
void OnCrash(int signal) {
  const Logger* const logger = crash_log.load(std::memory_order_acquire);
  for (int i = 0; i < kCrashWaits && logger != nullptr && !logger->written(); ++i) {
    nanosleep(&kCrashWait, nullptr);
  }
  ::signal(signal, SIG_DFL);
  raise(signal);  // delivered once the handler returns
}

}  // namespace

void PrepareWrites() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // open() takes the lowest free descriptor, which is this one.
    if (fcntl(stream, F_GETFD) < 0) (void)open("/dev/null", O_RDWR);
  }
}

void WriteLastLine(std::string_view line) {
  std::string text(line);
  text += '\n';
  for (size_t at = 0; at < text.size();) {
    // POLLOUT on a pipe guarantees room for PIPE_BUF bytes.
    pollfd wait{STDERR_FILENO, POLLOUT, 0};
    if (poll(&wait, 1, kReaderMs) <= 0) return;
    const ssize_t written =
        write(STDERR_FILENO, text.data() + at, std::min(text.size() - at, size_t{PIPE_BUF}));
    if (written <= 0) return;
    at += static_cast<size_t>(written);
  }
}

void WriteLogOnCrash(const Logger* logger) {
  crash_log.store(logger, std::memory_order_release);
  for (const int signal : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS}) {
    struct sigaction action = {};
    action.sa_handler = logger == nullptr ? SIG_DFL : OnCrash;
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace attend
