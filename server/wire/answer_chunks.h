// SPDX-License-Identifier: Apache-2.0
//
// Output that has been computed but not yet handed to a stream, in chunks. Not thread-safe.

#pragma once

#include <grpcpp/support/byte_buffer.h>

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
  // For the tensors that `whole` will write into `block`; empty at first.
  AnswerChunks(const Attention& whole, HostBlock block)
      : o_(static_cast<const char*>(whole.o.data)),
        lse_(reinterpret_cast<const char*>(whole.lse)),
        block_(std::make_shared<const HostBlock>(std::move(block))) {}

  // O and LSE of this part of the whole, each contiguous in memory, are computed.
  void Add(const Attention& part) {
    const auto* const o = static_cast<const char*>(part.o.data);
    Add(v1::TENSOR_NAME_O, o, o - o_, BytesO(part.problem));
    if (!part.problem.return_lse) return;
    const auto* const lse = reinterpret_cast<const char*>(part.lse);
    Add(v1::TENSOR_NAME_LSE, lse, lse - lse_, BytesLse(part.problem));
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
  void Add(v1::TensorName name, const char* data, int64_t offset, int64_t bytes) {
    if (bytes > 0) runs_.push_back({name, data, offset, bytes});
  }

  const char* o_ = nullptr;
  const char* lse_ = nullptr;
  std::shared_ptr<const HostBlock> block_;
  std::deque<Run> runs_;
};

}  // namespace attend
