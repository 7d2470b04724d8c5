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

// A channel of its own, with one socket per server that it may choose.
struct Connection {
  Connection(std::shared_ptr<grpc::Channel> channel, CompletionLoop* loop, int index)
      : channel(std::move(channel)), stub(this->channel), loop(loop), index(index) {}

  const std::shared_ptr<grpc::Channel> channel;
  grpc::GenericStub stub;
  CompletionLoop* const loop;
  const int index;  // within its set of connections
  std::atomic<int64_t> outstanding{0};
};

// Counts an unanswered call on a connection, from construction to Release.
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
  std::string target;                    // as ServerTarget returns it
  std::shared_ptr<const TlsClient> tls;  // null: plaintext
  int connections = 1;
  int completion_threads = 0;
  std::string token = {};        // of every call; empty: none
  std::string traceparent = {};  // of calls that set none
  // With several servers: idle time before a ping, and the time that the server has to answer it.
  std::chrono::nanoseconds keepalive_time = std::chrono::seconds(10);
  std::chrono::nanoseconds keepalive_timeout = std::chrono::seconds(5);
};

// The connections of a client, in two kinds. Those in any_ let gRPC choose a server for each call,
// round robin over the connected ones that report SERVING. Pinned ones go to one server, for calls
// that must reach it, and are made on first use.
class ConnectionPool {
 public:
  // `clock` must outlive the pool.
  ConnectionPool(const PoolOptions& options, const Clock& clock);

  // A lease on the connection with the fewest unanswered calls; in turn among equals. `server`:
  // where the call must go, valid for CheckServer; empty: any.
  Lease Acquire(const std::string& server = {}) ATTEND_EXCLUDES(mutex_);
  // Connections in any_, and in each pinned set.
  int size() const { return options_.connections; }
  // Whether the target may stand for several servers.
  bool several() const { return several_; }
  // INVALID_ARGUMENT unless `server` is empty, or a single server to which the token may be sent.
  Status CheckServer(const std::string& server) const;
  // The server of a call that has begun, for Acquire; empty if the client has only one.
  std::string ServerOf(const grpc::ClientContext& context) const;

  // For small calls, which must not queue behind tensors: to the named server, or to the first that
  // is reachable, whether it serves or not.
  std::shared_ptr<grpc::Channel> control(const std::string& server = {}) const
      ATTEND_EXCLUDES(mutex_);
  // The same to any serving server, in turn. Null unless several().
  const std::shared_ptr<grpc::Channel>& control_in_turn() const { return control_in_turn_; }
  // The loop of control calls.
  CompletionLoop* control_loop() const { return loops_.control(); }
  // Runs the deleters of memory that gRPC releases on a user's thread.
  CompletionLoop* loop() const { return loops_.at(0); }
  // Whether the caller runs on a thread that receives answers, and so must not wait for one.
  bool IsHere() const;
  // For deadlines and retries.
  const Clock& clock() const { return clock_; }
  // Adds the token, the tenant (empty: the caller's own) and the span (empty: the pool's) to the
  // call's metadata.
  void Introduce(const std::string& tenant, const std::string& traceparent,
                 grpc::ClientContext* context) const;
  const std::string& token() const { return options_.token; }
  // The status of an ended call. If TLS could not be established, finds out why and says so; this
  // can take up to two seconds.
  Status Explain(Status status) const;
  void Close();

 private:
  using Connections = std::vector<std::shared_ptr<Connection>>;
  // The connections to one server.
  struct Pinned {
    Connections connections;
    std::shared_ptr<grpc::Channel> control;
    uint64_t used = 0;  // the turn of the last use
  };

  enum class Use { kSmallCalls, kCalls };
  std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, Use use, bool spread) const;
  Connections MakeConnections(const std::string& target, bool spread) const;
  // `forgotten` receives connections that were dropped, to be released without the lock.
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

// Request ids of one client: 8 random hex digits and a counter, short enough for a slice without an
// allocation.
class RequestIds {
 public:
  explicit RequestIds(uint64_t seed);
  struct Id {
    static constexpr int kSizeMax = 21;  // longest id that EncodedCall sends without an allocation
    char text[24];
    int size;
    std::string_view view() const { return {text, static_cast<size_t>(size)}; }
  };
  Id Next();

 private:
  char prefix_[9];
  std::atomic<uint64_t> next_{0};
};

// INVALID_ARGUMENT: metadata cannot carry the name.
Status CheckTenant(const std::string& tenant);
// INVALID_ARGUMENT unless the text is empty or a traceparent of version 00.
Status CheckTraceParent(const std::string& traceparent);
// Checks the options that become metadata.
Status CheckNames(const std::string& tenant, const std::string& traceparent);
Status FromGrpc(const grpc::Status& status);
// The server's pushback, once the call has ended.
Pushback PushbackOf(const grpc::ClientContext& context);
// The server's --server-id, once its answer has begun; may be empty.
std::string ServerIdOf(const grpc::ClientContext& context);
// The sessions' actual lengths, if the failed call's metadata has them.
std::vector<int64_t> RefusedLengths(const grpc::ClientContext& context);
gpr_timespec DeadlineAfter(std::chrono::nanoseconds timeout);

}  // namespace attend::client
