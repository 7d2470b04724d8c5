// SPDX-License-Identifier: Apache-2.0
//
// Server reflection (grpc.reflection.v1alpha), as a callback service: gRPC's own takes a thread for
// each stream that is open.

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
