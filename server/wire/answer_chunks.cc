// SPDX-License-Identifier: Apache-2.0

#include "server/wire/answer_chunks.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace attend {

namespace {

// Holds the block while a chunk of it is being sent to a call's client.
struct SentBlock {
  SentBlock(std::shared_ptr<const HostBlock> held, WatchedRef watched, int64_t chunk_bytes)
      : block(std::move(held)), call(std::move(watched)), bytes(chunk_bytes) {
    call->Hold(bytes);
  }
  ~SentBlock() { call->Release(bytes); }
  const std::shared_ptr<const HostBlock> block;
  const WatchedRef call;
  const int64_t bytes;
};

}  // namespace

grpc::ByteBuffer AnswerChunks::Next(int64_t bytes_max, const WatchedRef& call) {
  Run& run = runs_.front();
  const int64_t bytes = std::min(bytes_max, run.bytes);
  const auto sent = std::make_shared<SentBlock>(block_, call, bytes);
  grpc::ByteBuffer message =
      EncodeChunk(run.name, run.offset, run.data, bytes, {sent, sent->block.get()});
  run.data += bytes;
  run.offset += bytes;
  run.bytes -= bytes;
  if (run.bytes == 0) runs_.pop_front();
  return message;
}

}  // namespace attend
