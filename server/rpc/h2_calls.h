// SPDX-License-Identifier: Apache-2.0
//
// The methods of a table, as called by the transport. For a call with tensors, the caller is
// checked before any message is read.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"
#include "server/transport/server_call.h"

namespace attend {

class H2Methods final : public CallMethods {
 public:
  // Maximum message size by path, for every method a server may have.
  using Bounds = std::map<std::string, MessageBound, std::less<>>;

  // Serves the table's methods. `bounds` must not be empty. The references must outlive every call.
  H2Methods(ServiceContext& context, const CallTable& table, Bounds bounds);

  MessageBound MessageBoundOf(std::string_view path) const override;
  CallHandler* Begin(ServerCall& call) override;
  // Plans, so that requests that arrived together run together.
  void OnTaken() override;

 private:
  ServiceContext& context_;
  const CallTable& table_;
  const Bounds bounds_;
  const MessageBound smallest_bound_;
};

}  // namespace attend
