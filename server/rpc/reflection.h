// SPDX-License-Identifier: Apache-2.0
//
// Server reflection (grpc.reflection.v1 and v1alpha) as callback services, because gRPC's own takes
// a thread for each open stream.

#pragma once

#include <string>
#include <vector>

#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/rpc/call_context.h"

namespace attend {

// Both versions have the same messages.
class ReflectionService final {
 public:
  // Lists `services`, and those that every server has, to callers with the scope info.
  ReflectionService(ServiceContext& context, std::vector<std::string> services);

  std::vector<grpc::Service*> versions() { return {&v1_, &v1alpha_}; }

 private:
  template <class Version>
  class Of final : public Version::template WithRawCallbackMethod_ServerReflectionInfo<
                       typename Version::Service> {
   public:
    explicit Of(ReflectionService& service) : service_(service) {}
    grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
        grpc::CallbackServerContext* call) override {
      return service_.Begin(method_, *call);
    }

   private:
    ReflectionService& service_;
    const std::string method_ =
        "/" + std::string(Version::service_full_name()) + "/ServerReflectionInfo";
  };

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Begin(
      const std::string& method, grpc::CallbackServerContext& call);

  ServiceContext& context_;
  std::vector<std::string> services_;
  Of<grpc::reflection::v1::ServerReflection> v1_{*this};
  Of<grpc::reflection::v1alpha::ServerReflection> v1alpha_{*this};
};

}  // namespace attend
