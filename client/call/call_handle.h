// SPDX-License-Identifier: Apache-2.0
//
// A handle to cancel a call or a stream's request.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace attend::client {

class Operation;

// Cancels a call, or a request of a stream, from any thread and at any time. No effect once it has
// ended.
class CallHandle {
 public:
  CallHandle() = default;
  explicit CallHandle(std::weak_ptr<Operation> op) : op_(std::move(op)) {}
  // Cancels one request of a stream. `serial` distinguishes it from other requests with the same
  // id.
  CallHandle(std::weak_ptr<Operation> op, std::string request, uint64_t serial)
      : op_(std::move(op)), request_(std::move(request)), serial_(serial) {}
  void Cancel();

 private:
  std::weak_ptr<Operation> op_;
  std::string request_;
  uint64_t serial_ = 0;
};

}  // namespace attend::client
