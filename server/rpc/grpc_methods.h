// SPDX-License-Identifier: Apache-2.0
//
// The methods of a table, carried by gRPC's library.

#pragma once

#include <grpcpp/impl/service_type.h>

#include "server/rpc/call_table.h"

namespace attend {

class GrpcMethods final : public grpc::Service {
 public:
  // All of it, and AttendChunked. The arguments must outlive the server.
  GrpcMethods(ServiceContext& context, const CallTable& table);

 private:
  // `path` must outlive this.
  void Add(const char* path, grpc::internal::RpcMethod::RpcType type,
           grpc::internal::MethodHandler* handler);

  int count_ = 0;
};

}  // namespace attend
