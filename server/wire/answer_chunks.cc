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

AnswerChunks::AnswerChunks(const Tensors& tensors, HostBlock block)
    : tensors_(tensors), block_(std::make_shared<const HostBlock>(std::move(block))), tensor_(0) {
  Skip();
}

void AnswerChunks::Skip() {
  for (; !empty() && offset_ == tensors_[tensor_].bytes; ++tensor_) offset_ = 0;
}

grpc::ByteBuffer AnswerChunks::Next(int64_t bytes_max, const WatchedRef& call) {
  const OutputTensor& tensor = tensors_[tensor_];
  const int64_t bytes = std::min(bytes_max, tensor.bytes - offset_);
  const auto sent = std::make_shared<SentBlock>(block_, call, bytes);
  grpc::ByteBuffer message =
      EncodeChunk(kNames[tensor_], offset_, static_cast<const char*>(tensor.data) + offset_, bytes,
                  {sent, sent->block.get()});
  offset_ += bytes;
  Skip();
  if (empty()) block_.reset();
  return message;
}

}  // namespace attend
