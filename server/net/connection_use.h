// SPDX-License-Identifier: Apache-2.0
//
// What a connection that gRPC has is used for: whether it is a stranger's, and what comes on it.

#pragma once

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
  const std::shared_ptr<CallMessages> messages;
};

}  // namespace attend
