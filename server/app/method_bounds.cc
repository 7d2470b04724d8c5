// SPDX-License-Identifier: Apache-2.0

#include "server/app/method_bounds.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

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

// Health asks nobody who they are.
constexpr int64_t kOpenBytesMax = 4096;
// Twice what the largest of the small messages may have.
constexpr int64_t kSmallBytesMax = int64_t{128} << 10;
// Of a stream of small requests.
constexpr int64_t kSmallStreamBytesMax = int64_t{1} << 20;

bool IsChunked(const MethodDescriptor& method) {
  return method.input_type() == v1::AttendChunkedRequest::descriptor();
}

bool HasTensors(const MethodDescriptor& method) {
  return method.input_type() == v1::AttendRequest::descriptor() || IsChunked(method) ||
         method.input_type() == inference::ModelInferRequest::descriptor();
}

}  // namespace

std::vector<MethodBound> MethodBounds(const Config& config) {
  std::vector<MethodBound> bounds;
  // The method says what is wrong with a message that is up to twice too long.
  const int64_t large = std::max(2 * config.max_request_bytes, kSmallBytesMax);
  const int64_t chunk = std::max(2 * ChunkBytesMax(config.max_request_bytes), kSmallBytesMax);
  const FileDescriptor* const health = grpc::health::v1::HealthCheckRequest::descriptor()->file();
  for (const FileDescriptor* const file :
       {v1::AttendRequest::descriptor()->file(), inference::ModelInferRequest::descriptor()->file(),
        v1::CreateSessionRequest::descriptor()->file(), v1::DrainRequest::descriptor()->file(),
        health, grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()->file(),
        grpc::reflection::v1::ServerReflectionRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const MethodDescriptor& method = *file->service(s)->method(m);
        MethodBound bound{"/" + method.service()->full_name() + "/" + method.name()};
        if (HasTensors(method)) {
          bound.message_max = IsChunked(method) ? chunk : large;
          if (!method.client_streaming()) bound.bytes_max = bound.message_max;
        } else {
          bound.bytes_max = method.client_streaming() ? kSmallStreamBytesMax : kSmallBytesMax;
        }
        if (file == health) bound.bytes_max = kOpenBytesMax;
        bounds.push_back(std::move(bound));
      }
    }
  }
  return bounds;
}

std::map<std::string, int64_t, std::less<>> MessageBounds(const Config& config) {
  std::map<std::string, int64_t, std::less<>> bounds;
  for (const MethodBound& each : MethodBounds(config)) {
    bounds[each.path] = std::min(each.bytes_max, each.message_max);
  }
  return bounds;
}

}  // namespace attend
