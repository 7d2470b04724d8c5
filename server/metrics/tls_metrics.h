// SPDX-License-Identifier: Apache-2.0
//
// What is counted of who may connect: clients that were refused; when what TLS needs expires, and
// whether changed files of it, and of who may read the metrics, were taken. Thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "server/metrics/make_family.h"

namespace attend {

// What can expire.
enum class TlsFile { kCert = 0, kClientCa, kCrl, kMetricsCert };
inline constexpr int kTlsFileCount = 4;

// Why a client may not connect, or stay. See ConnectionRefusal for what else ends connections.
enum class ClientRefusal {
  kTls = 0,    // its TLS handshake failed
  kPlaintext,  // it spoke without TLS where TLS is asked for
  kUser,       // its user may not connect to the Unix socket
  kStranger,   // no call of a caller's came in time, or before others needed its place
  kStalled,    // a message came no further
  kMessages,   // its unfinished messages took most, where all took too much
};
inline constexpr int kClientRefusalCount = 6;
const char* ClientRefusalName(ClientRefusal reason);

class TlsMetrics {
 public:
  // `registry` must outlive it. All series begin at zero; those of one registry are the same.
  explicit TlsMetrics(prometheus::Registry& registry);

  // attend_tls_expiry_timestamp_seconds{of}; 0: there is none
  void SetExpiry(TlsFile of, int64_t unix_seconds) {
    expiries_[static_cast<size_t>(of)]->Set(static_cast<double>(unix_seconds));
  }
  // attend_connections_refused_total{reason}
  void RecordRefused(ClientRefusal reason) { refused_[static_cast<size_t>(reason)]->Increment(); }
  // attend_tls_reloads_total{result}, attend_reload_failed{what}. `of` says whose certificates.
  void RecordReload(TlsFile of, bool ok) {
    (ok ? reloaded_ : kept_)->Increment();
    (of == TlsFile::kMetricsCert ? metrics_failed_ : failed_)->Set(ok ? 0 : 1);
  }
  // attend_reload_failed{what} of --metrics-auth
  void RecordMetricsAuth(bool ok) { metrics_auth_failed_->Set(ok ? 0 : 1); }

 private:
  std::array<prometheus::Gauge*, kTlsFileCount> expiries_{};
  std::array<prometheus::Counter*, kClientRefusalCount> refused_{};
  prometheus::Counter* reloaded_;
  prometheus::Counter* kept_;
  prometheus::Gauge* failed_;
  prometheus::Gauge* metrics_failed_;
  prometheus::Gauge* metrics_auth_failed_;
};

}  // namespace attend
