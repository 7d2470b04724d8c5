// SPDX-License-Identifier: Apache-2.0
//
// Output that has been computed but not yet handed to a stream, in chunks. Not thread-safe.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <array>
#include <cstdint>
#include <deque>
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
  // For the tensors of `whole`, which will be written into `block`; empty at first.
  AnswerChunks(const Tensors& whole, HostBlock block)
      : whole_(whole), block_(std::make_shared<const HostBlock>(std::move(block))) {}

  // The tensors of this part of the whole, each contiguous in memory, are computed.
  void Add(const Tensors& part) {
    for (size_t i = 0; i < part.size(); ++i) {
      if (part[i].bytes == 0) continue;
      const auto* const data = static_cast<const char*>(part[i].data);
      const int64_t offset = data - static_cast<const char*>(whole_[i].data);
      runs_.push_back({kNames[i], data, offset, part[i].bytes});
    }
  }
  bool empty() const { return runs_.empty(); }
  // The next chunk, of at most `bytes_max`; not if empty(). It shares the block. `call` writes it.
  grpc::ByteBuffer Next(int64_t bytes_max, const WatchedRef& call);

 private:
  struct Run {
    v1::TensorName name = v1::TENSOR_NAME_UNSPECIFIED;
    const char* data = nullptr;
    int64_t offset = 0;  // in the tensor
    int64_t bytes = 0;
  };
  // By Output.
  static constexpr std::array<v1::TensorName, kOutputsMax> kNames = {
      v1::TENSOR_NAME_O,   v1::TENSOR_NAME_LSE,    v1::TENSOR_NAME_D_Q,    v1::TENSOR_NAME_D_K,
      v1::TENSOR_NAME_D_V, v1::TENSOR_NAME_D_BIAS, v1::TENSOR_NAME_D_SINKS};

  Tensors whole_;
  std::shared_ptr<const HostBlock> block_;
  std::deque<Run> runs_;
};

}  // namespace attend
