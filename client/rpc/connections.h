// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the connections, the completion queues with their threads, and the
// choice among them. Owned by Client; outlives every operation.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <cassert>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/call/random.h"
#include "client/call/retry_policy.h"
#include "client/rpc/tls_client.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

#ifdef ATTEND_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace attend::client {

// What a completion queue hands back. `slot` tells an operation's events apart.
class Operation;
struct Event {
  Operation* operation = nullptr;
  int slot = 0;

  // The tag for gRPC. The thread that gets the event sees everything written before it. gRPC
  // ensures that, but ThreadSanitizer, which does not see into gRPC's library, must be told (Run,
  // which takes the tag, tells it the other half).
  void* Tag() {
#ifdef ATTEND_THREAD_SANITIZER
    __tsan_release(this);
#endif
    return this;
  }
};

// Anything in flight. Kept alive by itself while gRPC holds one of its events.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual void OnEvent(int slot, bool ok) = 0;
  virtual void Cancel() = 0;

 private:
  friend class CompletionLoop;
  Operation* previous_ = nullptr;
  Operation* next_ = nullptr;
};

// A completion queue and the thread that serves it.
class CompletionLoop {
 public:
  CompletionLoop();
  // Every operation must have been removed.
  ~CompletionLoop();

  grpc::CompletionQueue* queue() { return &queue_; }
  // From here to Remove the operation is cancelled when the client ends. After Close every new
  // one is refused (false).
  bool Add(Operation* operation);
  void Remove(Operation* operation);
  // Refuses new operations, cancels those in flight and waits for them.
  void Close();

 private:
  void Run();

  grpc::CompletionQueue queue_;
  Mutex mutex_;
  CondVar empty_;
  Operation* first_ ATTEND_GUARDED_BY(mutex_) = nullptr;
  bool closed_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

struct Connection {
  Connection(std::shared_ptr<grpc::Channel> channel, CompletionLoop* loop)
      : channel(std::move(channel)), stub(this->channel), loop(loop) {}

  std::shared_ptr<grpc::Channel> channel;
  grpc::GenericStub stub;
  CompletionLoop* loop;
  std::atomic<int64_t> outstanding{0};
};

class ConnectionPool {
 public:
  // `tls`: null without. `clock` must outlive the pool. `token`: every call's; empty: none.
  // `traceparent`: of calls that name none.
  ConnectionPool(const std::string& server, std::shared_ptr<const TlsClient> tls, int connections,
                 int completion_threads, const Clock& clock, std::string token = {},
                 std::string traceparent = {});

  // The connection with the fewest unanswered calls; in turn among equals. Counts one more there.
  int Acquire();
  void Release(int index) {
    [[maybe_unused]] const int64_t before =
        connections_[index]->outstanding.fetch_sub(1, std::memory_order_relaxed);
    assert(before > 0 && "released more often than acquired");
  }
  Connection& at(int index) { return *connections_[index]; }
  int size() const { return static_cast<int>(connections_.size()); }
  // For small calls, which must not wait for tensors to be sent.
  const std::shared_ptr<grpc::Channel>& control() const { return control_; }
  // What deadlines and retries go by.
  const Clock& clock() const { return clock_; }
  // Puts into the call's metadata who calls, for which tenant (empty: the caller's own), and which
  // span (empty: the pool's).
  void Introduce(const std::string& tenant, const std::string& traceparent,
                 grpc::ClientContext* context) const;
  const std::string& token() const { return token_; }
  // The status of a call that has ended. If it ended because no connection of TLS comes about, says
  // why; this can take a second or two.
  Status Explain(Status status) const;
  void Close();

 private:
  const Clock& clock_;
  const std::shared_ptr<const TlsClient> tls_;
  std::vector<std::unique_ptr<CompletionLoop>> loops_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::shared_ptr<grpc::Channel> control_;
  const std::string token_;
  const std::string traceparent_;
  std::atomic<uint64_t> turn_{0};
};

// Request ids of one client: 8 random hex digits and a counter, short enough for a slice without
// memory of its own.
class RequestIds {
 public:
  explicit RequestIds(uint64_t seed);
  struct Id {
    static constexpr int kSizeMax = 21;  // EncodedCall's, for an id without memory
    char text[24];
    int size;
    std::string_view view() const { return {text, static_cast<size_t>(size)}; }
  };
  Id Next();

 private:
  char prefix_[9];
  std::atomic<uint64_t> next_{0};
};

// INVALID_ARGUMENT if metadata cannot carry the name.
Status CheckTenant(const std::string& tenant);
// INVALID_ARGUMENT if the text, unless it is empty, is no traceparent of version 00.
Status CheckTraceParent(const std::string& traceparent);
// What of a call's or a stream's options goes into its metadata, checked.
Status CheckNames(const std::string& tenant, const std::string& traceparent);
Status FromGrpc(const grpc::Status& status);
// What the server said of trying again, once the call has ended.
Pushback PushbackOf(const grpc::ClientContext& context);
// What the sessions' lengths are, if the failed call's metadata says so.
std::vector<int64_t> RefusedLengths(const grpc::ClientContext& context);
gpr_timespec DeadlineAfter(std::chrono::nanoseconds timeout);

}  // namespace attend::client
