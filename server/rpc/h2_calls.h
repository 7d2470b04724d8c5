// SPDX-License-Identifier: Apache-2.0
//
// The methods that are served over this server's own transport. Who calls is asked before any
// message of a call that brings tensors is read.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "server/rpc/call_context.h"
#include "server/rpc/health_service.h"
#include "server/rpc/service_call.h"
#include "server/transport/server_call.h"

namespace attend {

class H2Methods final : public CallMethods {
 public:
  // The most bytes of a message, by path, of every method that a server may have.
  using Bounds = std::unordered_map<std::string, int64_t>;

  // The references must outlive every call. `bounds` has one method at least.
  H2Methods(ServiceContext& context, HealthService& health, Bounds bounds);

  int64_t MessageBytesMax(std::string_view path) const override;
  CallHandler* Begin(ServerCall& call) override;
  // Requests that came together run together.
  void OnTaken() override;

 private:
  using Small = std::function<void(ServiceCall::Wire)>;

  ServiceContext& context_;
  const Bounds bounds_;
  const int64_t smallest_bound_;
  // Methods with one small message each way.
  std::unordered_map<std::string, Small> small_;
};

}  // namespace attend
