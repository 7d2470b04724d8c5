// SPDX-License-Identifier: Apache-2.0
//
// Input blocks of requests whose messages are still arriving. The fields before a message's first
// tensor determine where all of its tensors belong, so they can be received in place.
//
// This is a prediction from bytes that have not been validated as a whole: the complete message is
// decoded like any other, and the block becomes the request's only if the tensors are where they
// belong. Otherwise, and when no memory is free, they are copied.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "server/memory/host_pool.h"
#include "server/util/message.h"
#include "server/wire/request_codec.h"

namespace attend {

// The block and the places in it.
class EarlyInput final : public MessagePlaces {
 public:
  ~EarlyInput() override;

  // Whether the block has the planned size and the message's tensors are at their planned places.
  bool Fits(const MessageScan& scan, const MemoryPlan& plan, const Validated& validated) const;
  // Call once.
  HostBlock TakeBlock();
  bool taken() const { return block_bytes_ == 0; }

 private:
  friend class EarlyInputs;
  void Uncount();

  HostBlock block_;
  int64_t block_bytes_ = 0;  // counted in `sum_`
  std::shared_ptr<std::atomic<int64_t>> sum_;
};

// Thread-safe.
class EarlyInputs {
 public:
  // `pool` must outlive all blocks. Together they have at most `bytes_max`, so that messages that
  // never end take little from those that do.
  EarlyInputs(HostPool& pool, int64_t bytes_max) : pool_(pool), bytes_max_(bytes_max) {}

  // For an AttendRequest of `bytes` that has begun with `begun`. Null if its tensors are not all
  // inline, at its end and in order, or there is no memory. May throw std::bad_alloc.
  std::shared_ptr<EarlyInput> Make(int tenant, std::span<const MessagePiece> begun,
                                   int64_t bytes) const;

 private:
  HostPool& pool_;
  const int64_t bytes_max_;
  const std::shared_ptr<std::atomic<int64_t>> sum_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace attend
