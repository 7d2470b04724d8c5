// SPDX-License-Identifier: Apache-2.0
//
// Bounds on a list that a server returns page by page.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend::client {

// Far above what any server lists, so that a faulty server cannot make the client list forever.
inline constexpr int64_t kListedMax = int64_t{1} << 20;
inline constexpr int64_t kListedBytesMax = int64_t{1} << 28;

// Checks the ids of a list of sessions: INTERNAL unless each is above the previous one, as the
// protocol requires, and the list is within the bounds.
class ListedIds {
 public:
  // `bytes`: size of the entry's message.
  Status Take(const std::string& id, size_t bytes) {
    if (id <= last_) {
      return Internal(
          "the server's list of sessions does not advance: an id is not above the one "
          "before it");
    }
    if (++count_ > kListedMax) {
      return Internal("the server's list of sessions has more than " + std::to_string(kListedMax) +
                      " entries");
    }
    bytes_ += static_cast<int64_t>(bytes);
    if (bytes_ > kListedBytesMax) {
      return Internal("the server's list of sessions has more than " +
                      std::to_string(kListedBytesMax) + " bytes");
    }
    last_ = id;
    return Status();
  }
  const std::string& last() const { return last_; }

 private:
  std::string last_;
  int64_t count_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace attend::client
