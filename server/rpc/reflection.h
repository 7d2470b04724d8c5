// SPDX-License-Identifier: Apache-2.0
//
// Server reflection (grpc.reflection.v1 and v1alpha, which have the same messages).

#pragma once

#include <string>
#include <vector>

#include "server/rpc/call_context.h"
#include "server/rpc/call_table.h"

namespace attend {

class ReflectionService final {
 public:
  // Lists `services`, and those that every server has, to callers with the scope info.
  ReflectionService(ServiceContext& context, std::vector<std::string> services);

  // Adds both versions. This must outlive the streams.
  void AddTo(CallTable& table);

 private:
  ServiceContext& context_;
  std::vector<std::string> services_;
};

}  // namespace attend
