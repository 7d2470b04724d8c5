// SPDX-License-Identifier: Apache-2.0
//
// A collector of OTLP over gRPC without TLS.

#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "kernels/util/mutex.h"
#include "server/trace/span_exporter.h"

namespace attend {

class OtlpSink final : public SpanSink {
 public:
  // "host:4317" or "unix:PATH". Connects on first use.
  explicit OtlpSink(const std::string& endpoint);
  Result<std::string> Send(const std::string& message, Duration timeout) override;
  void Cancel() override;

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  Mutex mutex_;
  grpc::ClientContext* sending_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
};

}  // namespace attend
