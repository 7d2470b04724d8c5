// SPDX-License-Identifier: Apache-2.0

#include "server/app/method_bounds.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>

#include "attend/v1/admin.pb.h"
#include "attend/v1/attention.pb.h"
#include "attend/v1/session.pb.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "inference/grpc_service.pb.h"
#include "server/wire/chunk_codec.h"

namespace attend {
namespace {

using google::protobuf::FileDescriptor;
using google::protobuf::MethodDescriptor;

// Health needs no credentials, so its messages are kept small.
constexpr int64_t kOpenBytesMax = 4096;
// Twice the size of the largest small message.
constexpr int64_t kSmallBytesMax = int64_t{128} << 10;

bool IsChunked(const MethodDescriptor& method) {
  return method.input_type() == v1::AttendChunkedRequest::descriptor();
}

bool HasTensors(const MethodDescriptor& method) {
  return method.input_type() == v1::AttendRequest::descriptor() || IsChunked(method) ||
         method.input_type() == inference::ModelInferRequest::descriptor();
}

MessageBound TwiceOrSmall(int64_t bytes, const char* origin) {
  return 2 * bytes > kSmallBytesMax ? MessageBound{2 * bytes, origin}
                                    : MessageBound{kSmallBytesMax};
}

}  // namespace

std::map<std::string, MessageBound, std::less<>> MessageBounds(const Config& config) {
  std::map<std::string, MessageBound, std::less<>> bounds;
  // Twice the limit, so that the method itself can refuse a message slightly too long with a
  // precise error.
  const MessageBound large = TwiceOrSmall(config.max_request_bytes, "twice --max-request-bytes");
  const MessageBound chunk = TwiceOrSmall(ChunkBytesMax(config.max_request_bytes),
                                          "twice GetServerInfo's limits.chunk_bytes_max");
  const FileDescriptor* const health = grpc::health::v1::HealthCheckRequest::descriptor()->file();
  for (const FileDescriptor* const file :
       {v1::AttendRequest::descriptor()->file(), inference::ModelInferRequest::descriptor()->file(),
        v1::CreateSessionRequest::descriptor()->file(), v1::DrainRequest::descriptor()->file(),
        health, grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()->file(),
        grpc::reflection::v1::ServerReflectionRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const MethodDescriptor& method = *file->service(s)->method(m);
        MessageBound& most = bounds["/" + method.service()->full_name() + "/" + method.name()];
        most = {kSmallBytesMax};
        if (HasTensors(method)) most = IsChunked(method) ? chunk : large;
        if (file == health) most = {kOpenBytesMax};
      }
    }
  }
  return bounds;
}

}  // namespace attend
