// SPDX-License-Identifier: Apache-2.0
//
// The use of a connection that is served: whether it is a stranger's, and what comes on it.

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

  std::shared_ptr<const ConnectionMarks> marks;  // null: it is no stranger's
  // Of messages that came, so far. One thread adds at a time; any may read.
  std::atomic<int64_t> data_bytes{0};
  // Those that no call has asked for, and the block that the connection reads into.
  std::atomic<int64_t> unread_bytes{0};
  const std::shared_ptr<CallMessages> messages;

  // About how much memory is kept of what came. A message that is neither whole nor asked for is
  // both, and counts once.
  int64_t Held() const {
    return std::max(messages->Held(), unread_bytes.load(std::memory_order_relaxed));
  }
};

}  // namespace attend
