// SPDX-License-Identifier: Apache-2.0
//
// Shared by tests of chunked calls: clients, calls, and the messages of a server.

#pragma once

#include <future>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "client/client.h"
#include "client/tool/call_spec.h"
#include "tests/client/support/fake_server.h"

namespace attend::client {

inline std::unique_ptr<Client> Connect(const std::string& address, int connections,
                                       int attempts = 5,
                                       int64_t chunked_bytes_min = kChunkedBytesMin) {
  ClientOptions options;
  options.server = address;
  options.connections = connections;
  options.chunked_bytes_min = chunked_bytes_min;
  options.retry.attempts_max = attempts;
  options.retry.backoff_initial = std::chrono::milliseconds(1);
  return std::move(*Client::Make(options));
}

inline CallOptions Chunked() {
  CallOptions options;
  options.transport = CallTransport::kChunked;
  return options;
}

inline AttentionCall RandomCall(const char* text, uint64_t seed) {
  return *MakeRandomCall(*ParseCallSpec(text), seed);
}

inline CallOutcome Wait(Client& client, const AttentionCall& call, const CallOptions& options) {
  std::promise<CallOutcome> promise;
  client.CallAsync(call, options,
                   [&](CallOutcome outcome) { promise.set_value(std::move(outcome)); });
  return promise.get_future().get();
}

// The call's time was over, or the server refused it as too late.
inline bool IsTooLate(const Status& status) {
  return status.code() == Code::kDeadlineExceeded ||
         (status.code() == Code::kResourceExhausted &&
          status.message().find("deadline: it is ") != std::string::npos);
}

inline v1::AttendChunkedResponse Grant(int streams_max = 1, int64_t chunk_bytes_max = 1000) {
  v1::AttendChunkedResponse message;
  message.mutable_grant()->set_token("0123456789abcdef");
  message.mutable_grant()->set_streams_max(streams_max);
  message.mutable_grant()->set_chunk_bytes_max(chunk_bytes_max);
  return message;
}

inline v1::AttendChunkedResponse Header(std::initializer_list<int64_t> shape) {
  v1::AttendChunkedResponse message;
  v1::Tensor* o = message.mutable_response()->mutable_o();
  o->set_dtype(v1::DTYPE_FLOAT32);
  for (const int64_t dim : shape) o->add_shape(dim);
  return message;
}

inline v1::AttendChunkedResponse Data(int tensor, uint64_t offset, size_t bytes, char fill = '\1') {
  v1::AttendChunkedResponse message;
  message.set_tensor(static_cast<v1::TensorName>(tensor));
  message.set_offset(offset);
  message.set_data(std::string(bytes, fill));
  return message;
}

}  // namespace attend::client
