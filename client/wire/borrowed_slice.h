// SPDX-License-Identifier: Apache-2.0
//
// Slices over a caller's memory, and where its owners' deleters run. gRPC lets go of a slice on any
// thread that is inside gRPC, of any call on the same connection. Deleters are code of the user's
// and may take locks of the user's, so they must run neither under a lock of the client nor on a
// thread that the user has inside the client. A ReleaseGate on such a thread's stack keeps what
// gRPC lets go of there, for a place where deleters may run.

#pragma once

#include <grpcpp/support/slice.h>

#include <functional>
#include <memory>
#include <utility>

#include "client/call/tensor.h"

namespace attend::client {

// One slice keeps these alive.
struct Borrowed {
  std::shared_ptr<const void> owner;
  std::shared_ptr<const void> keep_alive;
  Borrowed* next = nullptr;  // in a ReleasedMemory
};

// Memory that gRPC has let go of. Its destructor runs the owners' deleters.
class ReleasedMemory {
 public:
  ReleasedMemory() = default;
  ReleasedMemory(ReleasedMemory&& other) noexcept : first_(std::exchange(other.first_, nullptr)) {}
  ReleasedMemory& operator=(ReleasedMemory&&) = delete;
  ~ReleasedMemory();

  bool empty() const { return first_ == nullptr; }
  void Add(Borrowed* borrowed);  // takes it; needs no memory of its own

 private:
  Borrowed* first_ = nullptr;
};

// Keeps what slices let go of on this thread until End, or passes it on at once. Gates nest: the
// innermost one keeps it.
class ReleaseGate {
 public:
  using PassOn = std::function<void(ReleasedMemory)>;

  explicit ReleaseGate(PassOn pass_on = nullptr);
  // As End().
  ~ReleaseGate();
  ReleaseGate(const ReleaseGate&) = delete;
  ReleaseGate& operator=(const ReleaseGate&) = delete;

  // Opens it for good and returns what it has kept.
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
