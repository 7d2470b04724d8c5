// SPDX-License-Identifier: Apache-2.0

#include "client/stream.h"

#include <utility>

#include "client/rpc/stream_op.h"

namespace attend::client {
Stream::Stream(std::shared_ptr<StreamOp> op) : op_(std::move(op)) {}

Stream::~Stream() { Close(); }

void Stream::Close() {
  op_->Cancel();
  op_->WaitForEnd();
}

CallHandle Stream::Send(const AttentionCall& call, StreamCallback callback) {
  Result<EncodedCall> encoded = EncodedCall::Make(call);
  if (!encoded.ok()) {
    Refuse(callback, encoded.status());
    return CallHandle();
  }
  return Send(std::make_shared<const EncodedCall>(std::move(*encoded)), call.request_id,
              std::move(callback));
}

CallHandle Stream::Send(const std::shared_ptr<const EncodedCall>& call, std::string_view request_id,
                        StreamCallback callback) {
  if (!call->owned()) {
    Refuse(callback, InvalidArgument("a tensor has no owner; a stream sends from memory that it "
                                     "can keep alive"));
    return CallHandle();
  }
  return op_->Send(call, request_id, std::move(callback));
}

int Stream::connection() const { return op_->connection(); }

const std::string& Stream::server() const { return op_->server(); }

Status Stream::Finish() { return op_->Finish(); }

}  // namespace attend::client
