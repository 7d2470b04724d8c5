// SPDX-License-Identifier: Apache-2.0
//
// Keeps a list that a server gives in pages from going on for ever.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend::client {

// Far more sessions than a server has, and far more than is to be said of them.
inline constexpr int64_t kListedMax = int64_t{1} << 20;
inline constexpr int64_t kListedBytesMax = int64_t{1} << 28;

// Takes the next id of the list of sessions: INTERNAL unless it follows the one before, as the
// protocol says, and the list is not too long. Default-constructed: at the beginning.
class ListedIds {
 public:
  // `bytes`: the size of its entry's message.
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
