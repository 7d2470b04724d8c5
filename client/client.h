// SPDX-License-Identifier: Apache-2.0
//
// The client of an attend server: spreads calls over several connections, with deadlines, retries
// and typed results. Thread-safe. Answers arrive on the client's own completion threads, each of
// which serves one or more connections; asynchronous callbacks run there and must not block.
//
// Memory. Tensor bytes are sent from where they lie, without a copy. gRPC may still read them for a
// moment after a call has been cancelled or has timed out, so:
//   - Call() also accepts borrowed memory and returns only once gRPC has released it;
//   - CallAsync() and Stream accept only tensors with an owner, which they hold as long as needed.
// The caller must not change the memory in the meantime. Owners are released on completion threads
// or gRPC's, without a lock of the client held and never inside CallAsync, Cancel or Stream::Send.
// So the caller may hold a lock around those calls that a deleter takes as well. Deleters must not
// wait for the client.

#pragma once

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "client/call/attention_call.h"
#include "client/call/call_handle.h"
#include "client/call/call_options.h"
#include "client/call/retry_policy.h"
#include "client/call/tls_options.h"
#include "client/memory/shared_memory.h"
#include "client/stream.h"
#include "client/wire/message_codec.h"
#include "kernels/util/clock.h"

namespace attend::client {

struct ClientOptions {
  // In the syntax of ServerTarget (server_address.h). A list of addresses, or a name (dns:,
  // HOST:PORT), may stand for several servers. gRPC then sends calls to them in turn, skipping
  // servers that report NOT_SERVING. The streams of one chunked call go to one server, and so do
  // all calls of a session.
  std::string server = "127.0.0.1:8001";
  TlsOptions tls;              // read once, by Make
  int connections = 1;         // each with its own socket; in [1, 1024]
  int completion_threads = 0;  // 0: one per connection, at most cores / 2
  // Calls with at least this many tensor bytes, request plus answer, go in chunks over several
  // connections. Below it, one message is as fast and saves a round trip; above it, a message would
  // fill the server's memory before the server can refuse it. A call whose small fields exceed the
  // 4 MiB of a chunked header goes as one message. So do all calls once the server has answered a
  // chunked one with UNIMPLEMENTED; that call is resent as one message.
  int64_t chunked_bytes_min = kChunkedBytesMin;
  // The largest message that the server accepts, request or answer (Limits.request_bytes_max). A
  // larger call goes in chunks, or is refused here with INVALID_ARGUMENT if it must be one message.
  // 0: learnt from GetServerInfo, which Call itself asks before the first call of 64 KiB or more.
  int64_t message_bytes_max = 0;
  RetryPolicy retry;
  std::string traceparent;  // of calls and streams that set none; may be empty
  // The caller's credential, for servers with --tokens. Empty: the environment's ATTEND_TOKEN, if
  // set. Without TLS it is sent to loopback and Unix sockets only: Make refuses other targets.
  std::string token;
  // With several servers: a server that has been silent for keepalive_time is pinged. If it does
  // not answer within keepalive_timeout it is dropped and its calls end with UNAVAILABLE.
  // keepalive_time is at least one second, because servers treat more frequent pings as a flood.
  std::chrono::nanoseconds keepalive_time = std::chrono::seconds(10);
  std::chrono::nanoseconds keepalive_timeout = std::chrono::seconds(5);
  uint64_t seed = 0;  // for retry jitter and request ids; 0: from the system
  // For deadlines and retries; must outlive the client. Null: the steady clock. gRPC's own
  // deadlines and backoff timers use real time in any case.
  const Clock* clock = nullptr;
};

class ConnectionPool;
class Session;

enum class Health { kUnknown, kServing, kNotServing, kServiceUnknown };

class Client {
 public:
  // Returns INVALID_ARGUMENT for options out of bounds. Connects on first use.
  static Result<std::unique_ptr<Client>> Make(const ClientOptions& options);
  // Calls Close().
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Blocks until the answer has arrived.
  Result<AttentionResult> Call(const AttentionCall& call, const CallOptions& options = {});

  // Returns at once. `callback` runs exactly once: on a completion thread, or on this one if the
  // call is refused here. Tensors must have owners.
  CallHandle CallAsync(const AttentionCall& call, const CallOptions& options,
                       CallCallback callback);
  // The same for an encoded call, which saves serialising it again. An empty id is replaced by a
  // generated one.
  CallHandle CallAsync(const std::shared_ptr<const EncodedCall>& call, std::string_view request_id,
                       const CallOptions& options, CallCallback callback);

  // Opens a stream on the connection with the fewest calls. The stream must be destroyed before the
  // client.
  std::unique_ptr<Stream> OpenStream(const StreamOptions& options = {});

  // The server's version, devices, kernels and limits. From then on calls respect its limit on one
  // message. With several servers, one answers; `server` receives its address, in CallOptions'
  // form.
  Result<v1::GetServerInfoResponse> GetServerInfo(std::chrono::nanoseconds timeout,
                                                  std::string* server = nullptr);
  // Calls grpc.health.v1 Check for the named service; empty: the server as a whole.
  Result<Health> CheckHealth(const std::string& service, std::chrono::nanoseconds timeout);

  // Refuses new calls, cancels unanswered ones and waits for their callbacks. Must not be called
  // from a callback.
  void Close();

  int connections() const;
  // Whether the target may stand for several servers.
  bool several() const;
  // The token sent with calls; may be empty.
  const std::string& token() const;
  // The socket of the server's shared memory: `named` if not empty, else the path in `info`, which
  // is trusted only if the server's address is on this host. FAILED_PRECONDITION: shared memory is
  // off, or the server may be on another host. `server`: with several servers, the one that sent
  // `info`.
  Result<SharedSocket> FindSharedMemory(const v1::GetServerInfoResponse& info,
                                        const std::string& named = "",
                                        const std::string& server = "") const;

 private:
  friend class AdminCalls;  // of attend-client
  friend class Session;
  struct Impl;
  // INVALID_ARGUMENT: a bad tenant or traceparent, a server that is not the client's, or shared
  // memory with several servers and none named.
  Status Check(const CallOptions& options, bool shared_memory) const;
  // For Session's control calls.
  std::shared_ptr<grpc::Channel> control() const;
  const Clock& clock() const;
  const ConnectionPool& pool() const;
  RetryState MakeRetryState();
  // Asks the server for its limits before a call that may be too large for one message. The time
  // this takes is subtracted from options->timeout.
  void AskForLimits(const AttentionCall& call, CallOptions* options);
  // As Call, but returns the whole outcome.
  CallOutcome CallAndWait(const AttentionCall& call, const CallOptions& options);
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attend::client
