// SPDX-License-Identifier: Apache-2.0
//
// A collector of OTLP over gRPC, with TLS or without.

#pragma once

#include <memory>
#include <string>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/tls/outgoing_tls.h"
#include "server/trace/span_exporter.h"

namespace attend {

// All spans of the process have these.
struct SpanResource {
  std::string version;
  std::string instance;  // unique to the process
};

class OtlpSink final : public SpanSink {
 public:
  // As Config::otlp_endpoint has it. Connects on first use. Without https://, the files do not
  // count; else they are read, and an error says what is wrong with one.
  static Result<std::unique_ptr<OtlpSink>> Make(const std::string& endpoint,
                                                const OutgoingTls& files,
                                                const SpanResource& resource);
  // Reads the files again; if they are good, spans are sent over a new connection from now on.
  Status Reload() override;
  Result<PartialSuccess> Send(std::span<const CallSpan> calls, Duration timeout) override;
  void Cancel() override;
  ~OtlpSink() override;

 private:
  struct Connection;  // gRPC's, whose headers stay in otlp_sink.cc

  OtlpSink(const std::string& endpoint, const OutgoingTls& files, const SpanResource& resource);

  const std::string endpoint_;
  const OutgoingTls files_;
  const SpanResource resource_;
  Mutex mutex_;
  const std::unique_ptr<Connection> connection_;  // what it has is the mutex's
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace attend
