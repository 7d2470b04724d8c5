// SPDX-License-Identifier: Apache-2.0
//
// One AttendStream: many requests in flight on one gRPC call, with answers matched by request_id.
// Made by Client::OpenStream. Thread-safe; callbacks run on the client's completion threads and
// must not block.

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "client/call/call_handle.h"
#include "client/call/call_options.h"
#include "client/wire/message_codec.h"

namespace attend::client {

class StreamOp;

class Stream {
 public:
  explicit Stream(std::shared_ptr<StreamOp> op);
  // Calls Close().
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queues a request; `callback` runs exactly once. Backpressure: the server stops reading while
  // too many requests are unanswered. The queue here is unbounded, so the caller must limit the
  // number in flight. Ids of unanswered requests must differ; an empty id is replaced by a
  // generated one. The handle cancels the request on this side only: the server may still compute
  // it, and its id stays in use until the server has answered.
  CallHandle Send(const AttentionCall& call, StreamCallback callback);
  CallHandle Send(const std::shared_ptr<const EncodedCall>& call, std::string_view request_id,
                  StreamCallback callback);

  // Half-closes the stream, then waits until all requests are answered and the server has ended it.
  Status Finish();

  // Cancels the stream. On return, unanswered requests have ended with CANCELLED and new ones are
  // refused. Must not be called from a callback.
  void Close();

  int connection() const;
  // StreamOptions::server.
  const std::string& server() const;

 private:
  std::shared_ptr<StreamOp> op_;
};

}  // namespace attend::client
