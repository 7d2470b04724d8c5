// SPDX-License-Identifier: Apache-2.0
//
// Server reflection (grpc.reflection.v1alpha) as a callback service, because gRPC's own takes a
// thread for each open stream.

#pragma once

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"

namespace attend {

class ReflectionService final : public grpc::reflection::v1alpha::ServerReflection::
                                    WithRawCallbackMethod_ServerReflectionInfo<
                                        grpc::reflection::v1alpha::ServerReflection::Service> {
 public:
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override;
};

}  // namespace attend
