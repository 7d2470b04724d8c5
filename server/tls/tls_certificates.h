// SPDX-License-Identifier: Apache-2.0
//
// The files of certificates, and the TlsContext that is made of them. They are looked at again and
// again, by a thread once a second or by whoever needs them. Where they make no context (a
// half-written file, a certificate whose key has not come yet), the one before stays, and the log
// and a metric say so.

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
  // Paths; what is empty is off, cert and key must not be. `crl` may be a folder, whose files are
  // read in the order of their names. Errors call them by `settings` and "-cert" and so on.
  struct Options {
    std::string settings = "tls";
    std::string cert;
    std::string key;
    std::string client_ca;
    std::string crl;
    TlsContext::Options context = {};
    TlsFile of = TlsFile::kCert;  // what `cert` is as a metric
    std::function<std::time_t()> now = [] { return std::time(nullptr); };
  };

  // An error if the files make no context. `metrics` and `logger` must outlive the object.
  static Result<std::unique_ptr<TlsCertificates>> Load(Options options, TlsMetrics& metrics,
                                                       Logger& logger);
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

  // Looks once a second from here on, on a thread of its own, and calls `changed`, if there is one,
  // whenever something else is current. `clock` must outlive the object.
  void Watch(const Clock& clock, std::function<void()> changed = nullptr);
  // Looks at the files once: takes what has changed, if it is good. One thread at a time, and
  // nobody else once they are watched.
  void Look();

  // For connections that begin now. Thread-safe.
  std::shared_ptr<const TlsContext> current() const;
  // Another number with each of them. Read before it, it is no newer. Thread-safe.
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
  // The looking thread's:
  Stamps stamps_;       // of the files that were looked at last
  std::string unread_;  // why the system could not read them; it has been told
  mutable Mutex mutex_;
  std::shared_ptr<const TlsContext> context_ ATTEND_GUARDED_BY(mutex_);
  std::atomic<uint64_t> generation_{0};
  std::unique_ptr<PollThread> watch_;
};

}  // namespace attend
