// SPDX-License-Identifier: Apache-2.0
//
// The client of an attend server. It spreads calls over several connections, with deadlines,
// retries and typed results. Thread-safe. Answers are received on the client's own completion
// threads, each of which serves one connection or several; asynchronous callbacks run there and
// must not block.
//
// Memory. Tensor bytes are sent from where they are. gRPC may still read them for a moment after a
// call was cancelled or timed out, so:
//   - Call() takes borrowed memory too and returns only once gRPC has released it;
//   - CallAsync() and Stream take only tensors with an owner, which they hold as long as needed.
// The memory must not change meanwhile. Owners are let go of on completion threads or gRPC's, under
// no lock of the client's and never within CallAsync, Cancel or Stream::Send: a lock of the user's
// may be held around these that a deleter takes. Deleters must not wait for the client.

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
  // As ServerTarget in server_address.h takes it. A list of addresses, or a name (dns:, HOST:PORT),
  // may stand for several servers: gRPC gives calls to them in turn, except to those that say that
  // they do not serve. What belongs together goes to one server: the streams of a call in chunks,
  // a session and its calls.
  std::string server = "127.0.0.1:8001";
  TlsOptions tls;              // files are read once, by Make
  int connections = 1;         // each with its own socket; in [1, 1024]
  int completion_threads = 0;  // 0: one per connection, at most cores / 2
  // Calls with at least this many tensor bytes, request and answer together, go in chunks over
  // several connections. Below it, one message is as fast and saves a round trip; above it, a
  // message would fill the server's memory before the server can refuse it. Calls whose small
  // fields exceed the 4 MiB of a header go in one message. So do all calls once the server has
  // answered a chunked one with UNIMPLEMENTED; that call is sent again as a message.
  int64_t chunked_bytes_min = kChunkedBytesMin;
  // The largest message that the server accepts, request or answer (Limits.request_bytes_max). A
  // larger call goes in chunks, or is refused here with INVALID_ARGUMENT if it must be one message.
  // 0: unknown until GetServerInfo has been called; Call calls it once, before the first call of 64
  // KiB or more.
  int64_t message_bytes_max = 0;
  RetryPolicy retry;
  std::string traceparent;  // of calls and streams that name none; empty: they have none
  // Says who calls, where the server asks (its --tokens). Empty: the environment's ATTEND_TOKEN, if
  // there is one. Without TLS it goes to loopback and Unix sockets alone: Make refuses others.
  std::string token;
  // Where there may be several servers: one that has been silent for so long is asked whether it is
  // there, and is left out if it does not answer in time; its calls end with UNAVAILABLE. At least
  // a second, as servers take more for a flood.
  std::chrono::nanoseconds keepalive_time = std::chrono::seconds(10);
  std::chrono::nanoseconds keepalive_timeout = std::chrono::seconds(5);
  uint64_t seed = 0;  // for the jitter of retries and for request ids; 0: from the system
  // For deadlines and retries; must outlive the client. Null: the steady clock. gRPC ends attempts,
  // and waits between them, by the true time in any case.
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

  // Waits for the answer.
  Result<AttentionResult> Call(const AttentionCall& call, const CallOptions& options = {});

  // Returns at once; `callback` runs exactly once on a completion thread, or on this one if the
  // call is refused here. Tensors must have owners.
  CallHandle CallAsync(const AttentionCall& call, const CallOptions& options,
                       CallCallback callback);
  // The same for a call that is already encoded, so that a single message is not serialised again.
  // If the id is empty, the client makes one.
  CallHandle CallAsync(const std::shared_ptr<const EncodedCall>& call, std::string_view request_id,
                       const CallOptions& options, CallCallback callback);

  // Opens a stream on the connection with the fewest calls. Destroy the stream before the client.
  std::unique_ptr<Stream> OpenStream(const StreamOptions& options = {});

  // The server's version, devices, kernels and limits. From here on, calls respect its limit on one
  // message. Of several servers: one's; `server` is then where that is, as CallOptions takes it.
  Result<v1::GetServerInfoResponse> GetServerInfo(std::chrono::nanoseconds timeout,
                                                  std::string* server = nullptr);
  // Calls grpc.health.v1 Check for the named service; empty = the server as a whole.
  Result<Health> CheckHealth(const std::string& service, std::chrono::nanoseconds timeout);

  // Refuses new calls, cancels unanswered ones and waits for their callbacks. Not from a callback.
  void Close();

  int connections() const;
  // Whether it may have several servers.
  bool several() const;
  // What the client says who it is with; empty: nothing.
  const std::string& token() const;
  // Where the server's shared memory is: at `named` if that is not empty, else as its answer to
  // GetServerInfo says, which is followed only if the address is one of this host.
  // FAILED_PRECONDITION: it is elsewhere, or there is none. `server`: of several, the one that
  // answered, as GetServerInfo said.
  Result<SharedSocket> FindSharedMemory(const v1::GetServerInfoResponse& info,
                                        const std::string& named = "",
                                        const std::string& server = "") const;

 private:
  friend class AdminCalls;  // of attend-client
  friend class Session;
  struct Impl;
  // INVALID_ARGUMENT for what cannot go out, or not there.
  Status Check(const CallOptions& options, bool shared_memory) const;
  // Session's small calls use these.
  std::shared_ptr<grpc::Channel> control() const;
  const Clock& clock() const;
  const ConnectionPool& pool() const;
  RetryState MakeRetryState();
  // Asks the server for its limits before a call that may be too large for one message; the time
  // counts towards the call's timeout.
  void AskForLimits(const AttentionCall& call, CallOptions* options);
  // As Call, but returns the whole outcome.
  CallOutcome CallAndWait(const AttentionCall& call, const CallOptions& options);
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attend::client
