// SPDX-License-Identifier: Apache-2.0
//
// A collector of OTLP over gRPC, with TLS or without.

#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/tls/outgoing_tls.h"
#include "server/trace/span_exporter.h"

namespace attend {

class OtlpSink final : public SpanSink {
 public:
  // As Config::otlp_endpoint has it. Connects on first use. Without https://, the files do not
  // count; else they are read, and an error says what is wrong with one.
  static Result<std::unique_ptr<OtlpSink>> Make(const std::string& endpoint,
                                                const OutgoingTls& files);
  // Reads the files again; if they are good, what is sent from now on goes over a new connection.
  Status Reload() override;
  Result<std::string> Send(const std::string& message, Duration timeout) override;
  void Cancel() override;

 private:
  OtlpSink(const std::string& endpoint, const OutgoingTls& files)
      : endpoint_(endpoint), files_(files) {}

  const std::string endpoint_;
  const OutgoingTls files_;
  Mutex mutex_;
  std::shared_ptr<grpc::Channel> channel_ ATTEND_GUARDED_BY(mutex_);
  grpc::ClientContext* sending_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace attend
