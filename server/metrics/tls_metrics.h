// SPDX-License-Identifier: Apache-2.0
//
// Metrics of access: refused clients, expiry of TLS files, and reloads of TLS files and of
// --metrics-auth. Thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "server/metrics/make_family.h"

namespace attend {

// The files that can expire.
enum class TlsFile { kCert = 0, kClientCa, kCrl, kMetricsCert };
inline constexpr int kTlsFileCount = 4;

// Why a client may not connect, or not stay. ConnectionRefusal has the other reasons.
enum class ClientRefusal {
  kTls = 0,    // the TLS handshake failed
  kPlaintext,  // it spoke plaintext where TLS is required
  kUser,       // its user may not connect to the Unix socket
  kStranger,   // no accepted call in time, or before its place was needed
  kStalled,    // a message stalled
  kMessages,   // it held most memory in unfinished messages when all held too much
};
inline constexpr int kClientRefusalCount = 6;
const char* ClientRefusalName(ClientRefusal reason);

class TlsMetrics {
 public:
  // `registry` must outlive it. All series begin at zero; objects of one registry share them.
  explicit TlsMetrics(prometheus::Registry& registry);

  // attend_tls_expiry_timestamp_seconds{of}; 0: no such file
  void SetExpiry(TlsFile of, int64_t unix_seconds) {
    expiries_[static_cast<size_t>(of)]->Set(static_cast<double>(unix_seconds));
  }
  // attend_connections_refused_total{reason}
  void RecordRefused(ClientRefusal reason) { refused_[static_cast<size_t>(reason)]->Increment(); }
  // attend_tls_reloads_total{result}, attend_reload_failed{what} of the file's endpoint.
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
