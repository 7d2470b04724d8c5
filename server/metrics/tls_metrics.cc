// SPDX-License-Identifier: Apache-2.0

#include "server/metrics/tls_metrics.h"

#include <string>

namespace attend {
namespace {

constexpr std::array<const char*, kTlsFileCount> kNames = {"cert", "client_ca", "crl",
                                                           "metrics_cert"};

prometheus::Counter& Reloads(prometheus::Registry& registry, const char* result) {
  return MakeCounter(registry, "attend_tls_reloads_total",
                     "Reloads of changed files of --tls-* or --metrics-tls-*, by result",
                     {{"result", result}});
}

}  // namespace

TlsMetrics::TlsMetrics(prometheus::Registry& registry)
    : reloaded_(&Reloads(registry, "ok")),
      kept_(&Reloads(registry, "failed")),
      failed_(&ReloadFailedFamily(registry).Add({{"what", "tls"}})),
      metrics_failed_(&ReloadFailedFamily(registry).Add({{"what", "metrics-tls"}})),
      metrics_auth_failed_(&ReloadFailedFamily(registry).Add({{"what", "metrics-auth"}})) {
  for (size_t of = 0; of < expiries_.size(); ++of) {
    expiries_[of] =
        &MakeGauge(registry, "attend_tls_expiry_timestamp_seconds",
                   "Earliest expiry among the certificates of --tls-cert, --tls-client-ca or "
                   "--metrics-tls-cert, or the lists of --tls-crl, in seconds since 1970; 0: none",
                   {{"of", kNames[of]}});
  }
}

}  // namespace attend
