// SPDX-License-Identifier: Apache-2.0
//
// Cancels what was started.

#pragma once

#include <memory>
#include <string>
#include <utility>

namespace attend::client {

class Operation;

// Cancels a call or a stream's request, from any thread and at any time. Does nothing once that has
// ended.
class CallHandle {
 public:
  CallHandle() = default;
  // `request`: its id, if the operation is a stream.
  explicit CallHandle(std::weak_ptr<Operation> op, std::string request = {})
      : op_(std::move(op)), request_(std::move(request)) {}
  void Cancel();

 private:
  std::weak_ptr<Operation> op_;
  std::string request_;
};

}  // namespace attend::client
