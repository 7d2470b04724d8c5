// SPDX-License-Identifier: Apache-2.0
//
// The files of --tls-*, and the TlsContext that is made of them. A thread looks once a second
// whether they have changed. Where they make no context (a half-written file, a certificate whose
// key has not come yet), the one before stays, and the log and a metric say so.

#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/metrics/tls_metrics.h"
#include "server/tls/tls_context.h"

namespace attend {

class TlsCertificates {
 public:
  // Paths; what is empty is off, cert and key must not be. `crl` may be a folder, whose files are
  // read in the order of their names.
  struct Options {
    std::string cert;
    std::string key;
    std::string client_ca;
    std::string crl;
    bool require_client = true;
    std::function<std::time_t()> now = [] { return std::time(nullptr); };
  };

  // An error if the files make no context. `metrics` and `logger` must outlive the object.
  static Result<std::unique_ptr<TlsCertificates>> Load(Options options, TlsMetrics& metrics,
                                                       Logger& logger);
  ~TlsCertificates();
  TlsCertificates(const TlsCertificates&) = delete;
  TlsCertificates& operator=(const TlsCertificates&) = delete;

  // Looks at the files now and then from here on, on a thread of its own. Call once.
  void Watch();
  // Looks at the files once: takes what has changed, if it is good.
  void Look();

  // For connections that begin now. Thread-safe.
  std::shared_ptr<const TlsContext> current() const;

 private:
  TlsCertificates(Options options, TlsMetrics& metrics, Logger& logger)
      : options_(std::move(options)), metrics_(metrics), logger_(logger) {}
  std::string Marks() const;
  Result<std::shared_ptr<const TlsContext>> Read() const;
  void Use(std::shared_ptr<const TlsContext> context);
  void Run();

  const Options options_;
  TlsMetrics& metrics_;
  Logger& logger_;
  std::string marks_;  // of the files that were looked at last; the looking thread's
  mutable Mutex mutex_;
  CondVar changed_;
  bool ends_ ATTEND_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const TlsContext> context_ ATTEND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace attend
