// SPDX-License-Identifier: Apache-2.0
//
// An answer that has been computed but not yet handed to streams, in chunks. Not thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/memory/host_pool.h"
#include "server/request/request.h"
#include "server/wire/answer_watch.h"
#include "server/wire/chunk_codec.h"

namespace attend {

class AnswerChunks {
 public:
  AnswerChunks() = default;
  using Tensors = std::array<OutputTensor, kOutputsMax>;
  // The tensors are in `block`.
  AnswerChunks(const Tensors& tensors, HostBlock block);

  bool empty() const { return tensor_ == tensors_.size(); }
  // The next chunk, of at most `bytes_max`; not if empty(). It shares the block, which the last one
  // keeps alone. `call` writes it.
  OutMessage Next(int64_t bytes_max, const WatchedRef& call);

 private:
  // Skips what has no bytes left.
  void Skip();

  // By Output.
  static constexpr std::array<v1::TensorName, kOutputsMax> kNames = {
      v1::TENSOR_NAME_O,   v1::TENSOR_NAME_LSE,    v1::TENSOR_NAME_D_Q,    v1::TENSOR_NAME_D_K,
      v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_BIAS, v1::TENSOR_NAME_D_SINKS};

  Tensors tensors_;
  std::shared_ptr<const HostBlock> block_;
  size_t tensor_ = kOutputsMax;  // the one that is handed out
  int64_t offset_ = 0;           // in it
};

}  // namespace attend
