// SPDX-License-Identifier: Apache-2.0
//
// Internal to the client: the connections, and the choice among them. Owned by Client; outlives
// every operation.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/call/random.h"
#include "client/call/retry_policy.h"
#include "client/rpc/completion_loop.h"
#include "client/rpc/tls_client.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

namespace attend::client {

// A channel of its own, which is a socket to each of the servers that it may choose from.
struct Connection {
  Connection(std::shared_ptr<grpc::Channel> channel, CompletionLoop* loop, int index)
      : channel(std::move(channel)), stub(this->channel), loop(loop), index(index) {}

  const std::shared_ptr<grpc::Channel> channel;
  grpc::GenericStub stub;
  CompletionLoop* const loop;
  const int index;  // among those with the same choice
  std::atomic<int64_t> outstanding{0};
};

// An unanswered call's place on a connection.
class Lease {
 public:
  Lease() = default;
  explicit Lease(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {
    connection_->outstanding.fetch_add(1, std::memory_order_relaxed);
  }
  Lease(Lease&& other) noexcept = default;
  Lease& operator=(Lease&& other) noexcept {
    Release();
    connection_ = std::move(other.connection_);
    return *this;
  }
  ~Lease() { Release(); }

  void Release() {
    if (connection_ == nullptr) return;
    connection_->outstanding.fetch_sub(1, std::memory_order_relaxed);
    connection_ = nullptr;
  }
  Connection* operator->() const { return connection_.get(); }
  Connection& operator*() const { return *connection_; }

 private:
  std::shared_ptr<Connection> connection_;
};

struct PoolOptions {
  std::string target;                    // as ServerTarget gives it
  std::shared_ptr<const TlsClient> tls;  // null: without
  int connections = 1;
  int completion_threads = 0;
  std::string token = {};        // every call's; empty: none
  std::string traceparent = {};  // of calls that name none
  // A server of several is asked whether it is there once it has been silent for so long, and has
  // so long to answer.
  std::chrono::nanoseconds keepalive_time = std::chrono::seconds(10);
  std::chrono::nanoseconds keepalive_timeout = std::chrono::seconds(5);
};

// The connections of a client. Those to any of its servers, among which gRPC chooses for every
// call: in turn, of those that are connected and say that they serve. And, made when they are first
// asked for, those to one server for what must go to it.
class ConnectionPool {
 public:
  // `clock` must outlive the pool.
  ConnectionPool(const PoolOptions& options, const Clock& clock);

  // A place on the connection with the fewest unanswered calls; in turn among equals. `server`:
  // the calls' server, as CheckServer takes it; empty: any.
  Lease Acquire(const std::string& server = {}) ATTEND_EXCLUDES(mutex_);
  // As many for any server as for each.
  int size() const { return options_.connections; }
  // Whether the client may have several servers.
  bool several() const { return several_; }
  // INVALID_ARGUMENT unless it is empty or one server, to which the token may go.
  Status CheckServer(const std::string& server) const;
  // Who answers a call that has begun, for Acquire; empty where there is one server only.
  std::string ServerOf(const grpc::ClientContext& context) const;

  // For small calls, which must not wait for tensors to be sent. To the named server, or to the
  // first that is there, whether it serves or not.
  std::shared_ptr<grpc::Channel> control(const std::string& server = {}) const
      ATTEND_EXCLUDES(mutex_);
  // The same to any server that serves, in turn, if the client may have several.
  const std::shared_ptr<grpc::Channel>& control_in_turn() const { return control_in_turn_; }
  // Where they are made.
  CompletionLoop* control_loop() const { return loops_.control(); }
  // For what a thread of the user's inside gRPC leaves to a completion thread.
  CompletionLoop* loop() const { return loops_.at(0); }
  // Whether the caller runs where answers of calls come, so that it must not wait for one.
  bool IsHere() const;
  // What deadlines and retries go by.
  const Clock& clock() const { return clock_; }
  // Puts into the call's metadata who calls, for which tenant (empty: the caller's own), and which
  // span (empty: the pool's).
  void Introduce(const std::string& tenant, const std::string& traceparent,
                 grpc::ClientContext* context) const;
  const std::string& token() const { return options_.token; }
  // The status of a call that has ended. If it ended because no connection of TLS comes about, says
  // why; this can take a second or two.
  Status Explain(Status status) const;
  void Close();

 private:
  using Connections = std::vector<std::shared_ptr<Connection>>;
  // Those to one server.
  struct Pinned {
    Connections connections;
    std::shared_ptr<grpc::Channel> control;
    uint64_t used = 0;  // the turn
  };

  enum class Use { kSmallCalls, kCalls };
  std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, Use use, bool spread) const;
  Connections MakeConnections(const std::string& target, bool spread) const;
  // `forgotten`: connections that make room, to be let go of without the lock.
  Pinned& PinnedTo(const std::string& server, Pinned* forgotten) const ATTEND_REQUIRES(mutex_);
  static Lease Choose(const Connections& connections, uint64_t turn);

  const PoolOptions options_;
  const Clock& clock_;
  const bool several_;
  const CompletionLoops loops_;
  Connections any_;
  std::shared_ptr<grpc::Channel> control_, control_in_turn_;
  mutable std::atomic<uint64_t> turn_{0};
  mutable Mutex mutex_;
  mutable std::map<std::string, Pinned> pinned_ ATTEND_GUARDED_BY(mutex_);
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
// The server's own name, once its answer has begun; empty: it says none.
std::string ServerIdOf(const grpc::ClientContext& context);
// What the sessions' lengths are, if the failed call's metadata says so.
std::vector<int64_t> RefusedLengths(const grpc::ClientContext& context);
gpr_timespec DeadlineAfter(std::chrono::nanoseconds timeout);

}  // namespace attend::client
