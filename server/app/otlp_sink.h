// SPDX-License-Identifier: Apache-2.0
//
// Sends spans to an OTLP collector over gRPC, with or without TLS.

#pragma once

#include <memory>
#include <string>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/tls/outgoing_tls.h"
#include "server/trace/span_exporter.h"

namespace attend {

// Attributes of all spans of the process.
struct SpanResource {
  std::string version;
  std::string instance;  // unique to the process
};

class OtlpSink final : public SpanSink {
 public:
  // `endpoint` as in Config::otlp_endpoint. Connects on first use. With https:// the files are
  // read, and an error names the fault; otherwise they are ignored.
  static Result<std::unique_ptr<OtlpSink>> Make(const std::string& endpoint,
                                                const OutgoingTls& files,
                                                const SpanResource& resource);
  // Reads the files again; if they are valid, later spans use a new connection.
  Status Reload() override;
  Result<PartialSuccess> Send(std::span<const CallSpan> calls, Duration timeout) override;
  void Cancel() override;
  ~OtlpSink() override;

 private:
  struct Connection;  // gRPC types, kept out of this header

  OtlpSink(const std::string& endpoint, const OutgoingTls& files, const SpanResource& resource);

  const std::string endpoint_;
  const OutgoingTls files_;
  const SpanResource resource_;
  Mutex mutex_;
  const std::unique_ptr<Connection> connection_;  // its members are guarded by mutex_
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace attend
