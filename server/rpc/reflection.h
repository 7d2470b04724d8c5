// SPDX-License-Identifier: Apache-2.0
//
// Server reflection (grpc.reflection.v1 and v1alpha); gRPC's own takes a thread for each open
// stream.

#pragma once

#include <string>
#include <vector>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"

namespace attend {

// Its versions have the same messages.
class ReflectionService final {
 public:
  // Lists `services`, and those that every server has, to callers with the scope info.
  ReflectionService(ServiceContext& context, std::vector<std::string> services);

  // Both versions. This must outlive the streams.
  void AddTo(CallTable& table);

 private:
  ServiceContext& context_;
  std::vector<std::string> services_;
};

}  // namespace attend
