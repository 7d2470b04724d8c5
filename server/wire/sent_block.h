// SPDX-License-Identifier: Apache-2.0
//
// The owner of a piece of an output block that is being sent.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "server/memory/host_pool.h"
#include "server/util/message.h"
#include "server/wire/answer_watch.h"

namespace attend {

// Keeps the block and the call's watch alive until the transport releases the bytes.
class SentBlock {
 public:
  SentBlock(std::shared_ptr<const HostBlock> block, WatchedRef call, int64_t bytes)
      : block_(std::move(block)), call_(std::move(call)), bytes_(bytes) {
    call_->Hold(bytes_);
  }
  ~SentBlock() { call_->Release(bytes_); }
  SentBlock(const SentBlock&) = delete;
  SentBlock& operator=(const SentBlock&) = delete;

  // A message piece over `data`, which must be in the block.
  static MessagePiece Piece(std::shared_ptr<const HostBlock> block, const WatchedRef& call,
                            const char* data, int64_t bytes) {
    return {{data, static_cast<size_t>(bytes)},
            std::make_shared<const SentBlock>(std::move(block), call, bytes)};
  }

 private:
  const std::shared_ptr<const HostBlock> block_;
  const WatchedRef call_;
  const int64_t bytes_;
};

}  // namespace attend
