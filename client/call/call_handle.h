// SPDX-License-Identifier: Apache-2.0
//
// Cancels what was started.

#pragma once

#include <cstdint>
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
  explicit CallHandle(std::weak_ptr<Operation> op) : op_(std::move(op)) {}
  // Cancels one request of a stream. `serial` tells it from others that had or will have its id.
  CallHandle(std::weak_ptr<Operation> op, std::string request, uint64_t serial)
      : op_(std::move(op)), request_(std::move(request)), serial_(serial) {}
  void Cancel();

 private:
  std::weak_ptr<Operation> op_;
  std::string request_;
  uint64_t serial_ = 0;
};

}  // namespace attend::client
