// SPDX-License-Identifier: Apache-2.0
//
// The state of a connection in use: whether it is a stranger, and the message bytes it receives.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/net/call_messages.h"
#include "server/util/connection_marks.h"

namespace attend {

struct ConnectionUse {
  explicit ConnectionUse(std::shared_ptr<MessageMemory> memory = nullptr)
      : messages(std::make_shared<CallMessages>(std::move(memory))) {}

  std::shared_ptr<const ConnectionMarks> marks;  // null: calls need no credentials here
  // Message bytes received so far. One thread adds at a time; any may read.
  std::atomic<int64_t> data_bytes{0};
  // Message bytes that no call has read yet, and the connection's read block.
  std::atomic<int64_t> unread_bytes{0};
  const std::shared_ptr<CallMessages> messages;

  // Estimated memory held by received messages. An unfinished message that is also unread is in
  // both counts, so the larger one is taken, not the sum.
  int64_t Held() const {
    return std::max(messages->Held(), unread_bytes.load(std::memory_order_relaxed));
  }
};

}  // namespace attend
