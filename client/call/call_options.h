// SPDX-License-Identifier: Apache-2.0
//
// How a call or a stream is made, and how it ends.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "client/call/attention_call.h"
#include "kernels/util/status.h"

namespace attend::client {

// How a call's tensors travel.
enum class CallTransport {
  kAuto,    // by their bytes
  kInline,  // in one message
  kChunked  // in chunks, over several connections
};
inline constexpr int64_t kChunkedBytesMin = int64_t{16} << 20;

// What of an answer is copied out.
enum class Payload { kCopy, kDiscard };

struct CallOptions {
  std::chrono::nanoseconds timeout{0};  // of all attempts together; 0 = none
  Payload payload = Payload::kCopy;
  CallTransport transport = CallTransport::kAuto;  // what was encoded before stays as it is
  // Whose share of the server the call takes; empty: the default one's. Up to 256 characters of
  // printable ASCII.
  std::string tenant;
};

// How an asynchronous call ended.
struct CallOutcome {
  Status status;
  AttentionResult result;     // if status is OK
  int64_t payload_bytes = 0;  // of the answer's tensors
  int attempts = 1;
  int connection = 0;  // that the last attempt used; in chunks: the first one
};
using CallCallback = std::function<void(CallOutcome)>;

struct StreamOptions {
  std::chrono::nanoseconds timeout{0};  // of the whole stream; 0 = none
  Payload payload = Payload::kCopy;
  std::string tenant;  // of all its requests; as CallOptions::tenant
};

// How one request of a stream ended.
struct StreamAnswer {
  Status status;
  AttentionResult result;      // if status is OK
  int64_t payload_bytes = 0;   // of the answer's tensors
  int64_t retry_after_ms = 0;  // from the server, with a failure; 0 = none given
};
using StreamCallback = std::function<void(StreamAnswer)>;

}  // namespace attend::client
