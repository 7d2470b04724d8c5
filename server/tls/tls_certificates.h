// SPDX-License-Identifier: Apache-2.0
//
// Loads certificate files into a TlsContext, and reloads them when they change: checked once a
// second by a thread, or on demand. If the files are not usable (half-written, or a certificate
// without its new key), the previous context stays in use, and the log and a metric report it.

#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/metrics/tls_metrics.h"
#include "server/tls/tls_context.h"
#include "server/util/file_stamp.h"
#include "server/util/poll_thread.h"

namespace attend {

class TlsCertificates {
 public:
  // Paths; empty ones are off, but cert and key are required. `crl` may be a folder, whose files
  // are read in order of their names. Errors name `settings` with "-cert" and so on.
  struct Options {
    std::string settings = "tls";
    std::string cert;
    std::string key;
    std::string client_ca;
    std::string crl;
    TlsContext::Options context = {};
    TlsFile of = TlsFile::kCert;  // how the metrics label `cert`
    std::function<std::time_t()> now = [] { return std::time(nullptr); };
  };

  // An error if the files are not usable. `metrics` and `logger` must outlive the object.
  static Result<std::unique_ptr<TlsCertificates>> Load(Options options, TlsMetrics& metrics,
                                                       Logger& logger);
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

  // From now on checks once a second on its own thread, and calls `changed`, if set, after each
  // reload. `clock` must outlive the object.
  void Watch(const Clock& clock, std::function<void()> changed = nullptr);
  void StopWatching() { watch_.reset(); }
  // Checks the files once and loads what has changed, if it is usable. One thread at a time; must
  // not be called once Watch has been.
  void Look();

  // The context for new connections. Thread-safe.
  std::shared_ptr<const TlsContext> current() const;
  // Changes with every context. If read before current(), it is not newer than the context.
  // Thread-safe.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

 private:
  TlsCertificates(Options options, TlsMetrics& metrics, Logger& logger)
      : options_(std::move(options)), metrics_(metrics), logger_(logger) {}
  using Stamps = std::vector<std::pair<std::string, FileStamp>>;
  Stamps Stamped() const;
  Result<std::shared_ptr<const TlsContext>> Read() const;
  void Use(std::shared_ptr<const TlsContext> context);

  const Options options_;
  TlsMetrics& metrics_;
  Logger& logger_;
  // Used by the checking thread.
  Stamps stamps_;       // of the files last checked
  std::string unread_;  // the last reported read error
  mutable Mutex mutex_;
  std::shared_ptr<const TlsContext> context_ ATTEND_GUARDED_BY(mutex_);
  std::atomic<uint64_t> generation_{0};
  std::unique_ptr<PollThread> watch_;
};

}  // namespace attend
