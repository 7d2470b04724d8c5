// SPDX-License-Identifier: Apache-2.0
//
// A computed answer that is handed to streams in chunks. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/memory/host_pool.h"
#include "server/request/request.h"
#include "server/wire/chunk_codec.h"

namespace attend {

class AnswerChunks {
 public:
  AnswerChunks() = default;
  using Tensors = std::array<OutputTensor, kOutputsMax>;
  // The tensors must be in `block`.
  AnswerChunks(const Tensors& tensors, HostBlock block);

  bool empty() const { return tensor_ == tensors_.size(); }
  // The next chunk, of at most `bytes_max`; requires !empty(). Chunks share the block, and the last
  // one keeps it alive.
  OutMessage Next(int64_t bytes_max);

 private:
  // Skips tensors with no bytes left.
  void Skip();

  // Indexed by Output.
  static constexpr std::array<v1::TensorName, kOutputsMax> kNames = {
      v1::TENSOR_NAME_O,   v1::TENSOR_NAME_LSE,    v1::TENSOR_NAME_D_Q,    v1::TENSOR_NAME_D_K,
      v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_BIAS, v1::TENSOR_NAME_D_SINKS};

  Tensors tensors_;
  std::shared_ptr<const HostBlock> block_;
  size_t tensor_ = kOutputsMax;  // the current tensor
  int64_t offset_ = 0;           // offset in it
};

}  // namespace attend
