// SPDX-License-Identifier: Apache-2.0
//
// Server reflection (grpc.reflection.v1alpha) as a callback service, because gRPC's own takes a
// thread for each open stream.

#pragma once

#include <string>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/rpc/call_context.h"

namespace attend {

class ReflectionService final : public grpc::reflection::v1alpha::ServerReflection::
                                    WithRawCallbackMethod_ServerReflectionInfo<
                                        grpc::reflection::v1alpha::ServerReflection::Service> {
 public:
  // Lists `services`, and those that every server has, to callers with the scope info.
  ReflectionService(ServiceContext& context, std::vector<std::string> services);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override;

 private:
  ServiceContext& context_;
  std::vector<std::string> services_;
};

}  // namespace attend
