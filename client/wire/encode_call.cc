// SPDX-License-Identifier: Apache-2.0
//
// Decides whether a call goes in one message or in chunks.

#include <memory>
#include <utility>

#include "client/wire/chunk_codec.h"
#include "client/wire/message_codec.h"

namespace attend::client {

Result<EncodedCall> EncodedCall::MakeChunked(const AttentionCall& call,
                                             std::shared_ptr<const void> keep_alive) {
  if (UsesSharedMemory(call)) {
    return InvalidArgument("a call over shared memory is sent as one message, not in chunks");
  }
  if (!HasKeys(call)) {
    return InvalidArgument("v has no shape, so O's size is unknown: the call must be one message");
  }
  Result<ChunkedCall> chunked = ChunkedCall::Make(call, std::move(keep_alive));
  if (!chunked.ok()) return chunked.status();
  EncodedCall encoded;
  encoded.payload_bytes_ = chunked->payload_bytes();
  encoded.owned_ = chunked->owned();
  encoded.chunked_ = std::make_shared<const ChunkedCall>(std::move(*chunked));
  return encoded;
}

Result<EncodedCall> EncodeCall(const AttentionCall& call, CallTransport transport,
                               const MessageBounds& bounds,
                               std::shared_ptr<const void> keep_alive) {
  const auto make_message = [&]() -> Result<EncodedCall> {
    Result<EncodedCall> message = EncodedCall::Make(call, keep_alive);
    if (!message.ok()) return message;
    ATTEND_RETURN_IF_ERROR(message->CheckMessageBytes(bounds.message_bytes_max));
    return message;
  };
  const bool chunks_allowed =
      transport != CallTransport::kInline &&
      (transport == CallTransport::kChunked || (!UsesSharedMemory(call) && HasKeys(call)));
  if (!chunks_allowed) return make_message();
  if (transport == CallTransport::kAuto &&
      PayloadBytes(call) + AnswerBytes(call) < bounds.chunked_bytes_min) {
    Result<EncodedCall> message = make_message();
    if (message.ok()) return message;
  }
  Result<EncodedCall> encoded = EncodedCall::MakeChunked(call, keep_alive);
  if (!encoded.ok() || transport == CallTransport::kChunked) return encoded;
  Result<EncodedCall> message = make_message();
  if (encoded->chunked()->header_bytes() > kChunkedHeaderBytesMax) return message;
  if (message.ok()) {
    encoded->as_message_ = std::make_shared<const EncodedCall>(std::move(*message));
  }
  return encoded;
}

}  // namespace attend::client
