// SPDX-License-Identifier: Apache-2.0
//
// Options of a call or a stream, and how it ended.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "client/call/attention_call.h"
#include "kernels/util/status.h"

namespace attend::client {

// How a call's tensors are sent.
enum class CallTransport {
  kAuto,    // chosen by size
  kInline,  // in one message
  kChunked  // in chunks, over several connections
};
inline constexpr int64_t kChunkedBytesMin = int64_t{16} << 20;

// Whether an answer's tensors are copied out.
enum class Payload { kCopy, kDiscard };

struct CallOptions {
  std::chrono::nanoseconds timeout{0};  // of all attempts together; 0 = none
  Payload payload = Payload::kCopy;
  CallTransport transport = CallTransport::kAuto;  // ignored for an EncodedCall
  // The tenant that is charged for the call; empty: the default tenant. Up to 256 characters of
  // printable ASCII.
  std::string tenant;
  // The span that makes the call, in W3C Trace Context's form (version 00); empty: the client's.
  std::string traceparent = {};
  // The server to call, if the client has several: HOST:PORT, as in CallOutcome and Session. Empty:
  // any that serves. A call over shared memory must name its server.
  std::string server = {};
};

// How an asynchronous call ended.
struct CallOutcome {
  Status status;
  AttentionResult result = {};  // if status is OK; else only session_lengths, if a length was wrong
  int64_t payload_bytes = 0;    // of the answer's tensors
  int attempts = 1;
  int64_t retry_after_ms = 0;  // from the server, with a failure; 0: none given
  int connection = 0;          // of the last attempt; of a chunked call: its first stream's
  // The server that answered: its own name (--server-id), and its address. Empty if none did, or if
  // the client has only one server.
  std::string server_id = {};
  std::string server = {};
};
using CallCallback = std::function<void(CallOutcome)>;

struct StreamOptions {
  std::chrono::nanoseconds timeout{0};  // of the whole stream; 0 = none
  Payload payload = Payload::kCopy;
  std::string tenant;            // of all its requests; as CallOptions::tenant
  std::string traceparent = {};  // likewise
  std::string server = {};       // likewise; all its requests go to one server in any case
};

// How one request of a stream ended.
struct StreamAnswer {
  Status status;
  AttentionResult result = {};  // as CallOutcome's
  int64_t payload_bytes = 0;    // of the answer's tensors
  int64_t retry_after_ms = 0;   // from the server, with a failure; 0: none given
  std::string server_id = {};   // as CallOutcome's
  std::string server = {};
};
using StreamCallback = std::function<void(StreamAnswer)>;

}  // namespace attend::client
