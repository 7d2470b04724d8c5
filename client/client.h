// SPDX-License-Identifier: Apache-2.0
//
// The client of an attend server: calls striped over several connections, with deadlines, retries
// and typed results. Thread-safe. Answers are taken in on the client's own completion threads, one
// for each connection or several; asynchronous callbacks run there and must not block.
//
// Memory. Tensor bytes are sent from where they lie. gRPC may still read them for a moment after a
// call was cancelled or timed out, so:
//   - Call() takes borrowed memory too and returns only once gRPC has let go of it;
//   - CallAsync() and Stream take only tensors with an owner, which they hold as long as needed.
// The memory must not change meanwhile.

#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "client/call/attention_call.h"
#include "client/call/call_options.h"
#include "client/call/retry_policy.h"
#include "client/stream.h"
#include "client/wire/message_codec.h"

namespace attend::client {

struct ClientOptions {
  std::string server = "127.0.0.1:8001";  // as ServerTarget in server_address.h takes it
  int connections = 1;                    // each its own socket; in [1, 1024]
  int completion_threads = 0;             // 0: one for each connection, at most cores / 2
  // Calls of at least this many tensor bytes, both ways together, go in chunks over several of the
  // connections; below, one message is as fast and saves a round trip. Above, it would stand in the
  // server's memory before that can refuse it. Calls whose small fields exceed the 4 MiB of a
  // header go in one message, and so do all once the server has shown that it knows no chunks: a
  // call that it calls UNIMPLEMENTED is sent again as a message.
  int64_t chunked_bytes_min = kChunkedBytesMin;
  // What the server takes in one message, request or answer (Limits.request_bytes_max). A call that
  // has more goes in chunks, or is refused here with INVALID_ARGUMENT where it must be a message.
  // 0: unknown until GetServerInfo has been called; Call does so itself, once, before the first
  // call of 64 KiB or more.
  int64_t message_bytes_max = 0;
  RetryPolicy retry;
  uint64_t seed = 0;  // of the retries' jitter and of request ids; 0: from the system
};

class Operation;

// Cancels a call from any thread, any time; after its end it does nothing.
class CallHandle {
 public:
  CallHandle() = default;
  explicit CallHandle(std::weak_ptr<Operation> op) : op_(std::move(op)) {}
  void Cancel();

 private:
  std::weak_ptr<Operation> op_;
};

enum class Health { kUnknown, kServing, kNotServing, kServiceUnknown };

class Client {
 public:
  // INVALID_ARGUMENT for options out of bounds. Connects on first use.
  static Result<std::unique_ptr<Client>> Make(const ClientOptions& options);
  // Closes.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Waits for the answer.
  Result<AttentionResult> Call(const AttentionCall& call, const CallOptions& options = {});

  // Returns at once; `callback` runs exactly once on a completion thread, or on this one if the
  // call is refused here. Tensors must have owners.
  CallHandle CallAsync(const AttentionCall& call, const CallOptions& options,
                       CallCallback callback);
  // The same for a call encoded before: no serialisation of one message. An empty id: the client
  // makes one.
  CallHandle CallAsync(const std::shared_ptr<const EncodedCall>& call, std::string_view request_id,
                       const CallOptions& options, CallCallback callback);

  // Opens a stream on the connection with the fewest calls. It must be destroyed before the client.
  std::unique_ptr<Stream> OpenStream(const StreamOptions& options = {});

  // What the server is, has and allows; from here on calls keep to its bound of one message.
  Result<v1::GetServerInfoResponse> GetServerInfo(std::chrono::nanoseconds timeout);
  // grpc.health.v1 Check of the named service; empty = the server as a whole.
  Result<Health> CheckHealth(const std::string& service, std::chrono::nanoseconds timeout);

  // Refuses new calls, cancels what is unanswered and waits for its callbacks. Not from a callback.
  void Close();

  int connections() const;

 private:
  struct Impl;
  // Before a call that may be too large for one message; takes its time from the call's.
  void AskForLimits(const AttentionCall& call, CallOptions* options);
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attend::client
