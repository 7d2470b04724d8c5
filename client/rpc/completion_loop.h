// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: operations in flight, and the completion queues and threads that serve
// them.

#pragma once

#include <grpcpp/completion_queue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/wire/borrowed_slice.h"
#include "kernels/util/mutex.h"

#ifdef ATTEND_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace attend::client {

// An event of a completion queue. `slot` distinguishes the events of one operation.
class Operation;
struct Event {
  Operation* operation = nullptr;
  int slot = 0;

  // The tag for gRPC. The thread that gets the event sees everything written before it. gRPC
  // guarantees that, but ThreadSanitizer cannot see into gRPC's library and must be told; Run has
  // the acquiring half.
  void* Tag() {
#ifdef ATTEND_THREAD_SANITIZER
    __tsan_release(this);
#endif
    return this;
  }
};

// Anything in flight. Owns itself while gRPC holds one of its events.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  virtual ~Operation() = default;
  virtual void OnEvent(int slot, bool ok) = 0;
  // From any thread, even under the caller's locks: it only posts the cancellation to a completion
  // thread.
  virtual void Cancel() = 0;
  // Cancels one request of a stream; `serial` as in its handle.
  virtual void CancelRequest(const std::string& /*id*/, uint64_t /*serial*/) {}

 private:
  friend class CompletionLoop;
  Operation* previous_ = nullptr;
  Operation* next_ = nullptr;
};

// A completion queue and the thread that serves it.
class CompletionLoop {
 public:
  // `releases`: the loop that runs the deleters of memory released by gRPC on this loop's thread;
  // it must outlive that thread. A loop with `releases` polls only while it has operations: any
  // polling thread receives the events of all queues from the kernel, and one thread too many
  // halves the rate of small calls. Null: this loop runs the deleters itself and always polls.
  explicit CompletionLoop(CompletionLoop* releases = nullptr);
  // Calls Shutdown.
  ~CompletionLoop();

  grpc::CompletionQueue* queue() { return &queue_; }
  // Whether the caller runs on the loop's thread.
  bool IsHere() const { return std::this_thread::get_id() == thread_.get_id(); }
  // From Add to Remove, Close cancels the operation and waits for it. After Close, Add returns
  // false.
  bool Add(Operation* operation);
  void Remove(Operation* operation);
  // Runs `function` soon on the loop's thread and destroys it there; after Shutdown, on the
  // caller's.
  void Post(std::function<void()> function);
  // Runs the deleters as Post runs a function.
  void Release(ReleasedMemory memory);
  // Refuses new operations, cancels those in flight and waits for them.
  void Close();
  // Waits until every operation has been removed, and ends the thread.
  void Shutdown();

 private:
  class Posted;

  void Run();
  void WaitForOperations();
  void Enter(Operation* operation) ATTEND_REQUIRES(mutex_);

  grpc::CompletionQueue queue_;
  Mutex mutex_;
  CondVar empty_, busy_;
  Operation* first_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  bool closed_ ATTEND_GUARDED_BY(mutex_) = false;
  bool shut_down_ ATTEND_GUARDED_BY(mutex_) = false;
  CompletionLoop* const releases_;
  std::thread thread_;
};

// A client's loops. An event on one can lead to events on another, so all threads end before any
// loop is destroyed.
class CompletionLoops {
 public:
  explicit CompletionLoops(int count);
  ~CompletionLoops();

  // For control calls. No user code runs on its thread.
  CompletionLoop* control() const { return &*control_; }
  CompletionLoop* at(int n) const { return &*loops_[static_cast<size_t>(n)]; }
  int count() const { return static_cast<int>(loops_.size()); }

 private:
  std::vector<std::unique_ptr<CompletionLoop>> loops_;
  std::unique_ptr<CompletionLoop> control_;
};

}  // namespace attend::client
