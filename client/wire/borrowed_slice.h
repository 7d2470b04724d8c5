// SPDX-License-Identifier: Apache-2.0
//
// Slices over a caller's memory, and the threads on which its owners' deleters run. gRPC may
// release a slice on any thread inside gRPC, for any call on the same connection. Deleters are user
// code and may take the user's locks, so they must run neither under a lock of the client nor on a
// user's thread inside the client. A ReleaseGate on such a thread's stack collects what gRPC
// releases there, for a thread on which deleters may run.

#pragma once

#include <grpcpp/support/slice.h>

#include <functional>
#include <memory>
#include <utility>

#include "client/call/tensor.h"

namespace attend::client {

// The references that one slice holds.
struct Borrowed {
  std::shared_ptr<const void> owner;
  std::shared_ptr<const void> keep_alive;
  Borrowed* next = nullptr;  // in a ReleasedMemory
};

// Memory that gRPC has released. The destructor runs the owners' deleters.
class ReleasedMemory {
 public:
  ReleasedMemory() = default;
  ReleasedMemory(ReleasedMemory&& other) noexcept : first_(std::exchange(other.first_, nullptr)) {}
  ReleasedMemory& operator=(ReleasedMemory&&) = delete;
  ~ReleasedMemory();

  bool empty() const { return first_ == nullptr; }
  void Add(Borrowed* borrowed);  // takes ownership; allocates nothing

 private:
  Borrowed* first_ = nullptr;
};

// Collects what is released on this thread until End, or passes it on at once. Gates nest: the
// innermost one collects.
class ReleaseGate {
 public:
  using PassOn = std::function<void(ReleasedMemory)>;

  explicit ReleaseGate(PassOn pass_on = nullptr);
  // Calls End() if it was not called.
  ~ReleaseGate();
  ReleaseGate(const ReleaseGate&) = delete;
  ReleaseGate& operator=(const ReleaseGate&) = delete;

  // Ends the gate and returns what it has collected.
  ReleasedMemory End();

 private:
  friend grpc::Slice BorrowedSlice(const TensorRef& tensor, std::shared_ptr<const void> keep_alive);

  static void Release(Borrowed* borrowed);

  bool open_ = false;
  ReleaseGate* outer_;
  const PassOn pass_on_;
  ReleasedMemory kept_;
};

// A slice over the tensor's memory that holds its owner and `keep_alive`.
grpc::Slice BorrowedSlice(const TensorRef& tensor, std::shared_ptr<const void> keep_alive);

}  // namespace attend::client
