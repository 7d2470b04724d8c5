// SPDX-License-Identifier: Apache-2.0

#include "server/wire/answer_chunks.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace attend {

AnswerChunks::AnswerChunks(const Tensors& tensors, HostBlock block)
    : tensors_(tensors), block_(std::make_shared<const HostBlock>(std::move(block))), tensor_(0) {
  Skip();
}

void AnswerChunks::Skip() {
  for (; !empty() && offset_ == tensors_[tensor_].bytes; ++tensor_) offset_ = 0;
}

OutMessage AnswerChunks::Next(int64_t bytes_max) {
  const OutputTensor& tensor = tensors_[tensor_];
  const int64_t bytes = std::min(bytes_max, tensor.bytes - offset_);
  const char* const data = static_cast<const char*>(tensor.data) + offset_;
  OutMessage message =
      EncodeChunk(kNames[tensor_], offset_, {{data, static_cast<size_t>(bytes)}, block_});
  offset_ += bytes;
  Skip();
  if (empty()) block_.reset();
  return message;
}

}  // namespace attend
