// SPDX-License-Identifier: Apache-2.0
//
// Metrics of access: expiry of TLS files, and reloads of TLS files and of --metrics-auth.
// Thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "server/metrics/make_family.h"

namespace attend {

// The files that can expire.
enum class TlsFile { kCert = 0, kClientCa, kCrl, kMetricsCert };
inline constexpr int kTlsFileCount = 4;

class TlsMetrics {
 public:
  // `registry` must outlive it. All series begin at zero; objects of one registry share them.
  explicit TlsMetrics(prometheus::Registry& registry);

  // attend_tls_expiry_timestamp_seconds{of}; 0: no such file
  void SetExpiry(TlsFile of, int64_t unix_seconds) {
    expiries_[static_cast<size_t>(of)]->Set(static_cast<double>(unix_seconds));
  }
  // attend_tls_reloads_total{result}, attend_reload_failed{what} of the file's endpoint.
  void RecordReload(TlsFile of, bool ok) {
    (ok ? reloaded_ : kept_)->Increment();
    (of == TlsFile::kMetricsCert ? metrics_failed_ : failed_)->Set(ok ? 0 : 1);
  }
  // attend_reload_failed{what} of --metrics-auth
  void RecordMetricsAuth(bool ok) { metrics_auth_failed_->Set(ok ? 0 : 1); }

 private:
  std::array<prometheus::Gauge*, kTlsFileCount> expiries_{};
  prometheus::Counter* reloaded_;
  prometheus::Counter* kept_;
  prometheus::Gauge* failed_;
  prometheus::Gauge* metrics_failed_;
  prometheus::Gauge* metrics_auth_failed_;
};

}  // namespace attend
