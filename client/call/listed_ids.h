// SPDX-License-Identifier: Apache-2.0
//
// Keeps a list that a server gives in pages from going on for ever.

#pragma once

#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr int64_t kListedMax = int64_t{1} << 20;  // far more sessions than a server has

// Takes the next id of the list of sessions: INTERNAL unless it follows the one before, as the
// protocol says, and the list is not too long. Default-constructed: at the beginning.
class ListedIds {
 public:
  Status Take(const std::string& id) {
    if (id <= last_) {
      return Internal(
          "the server's list of sessions does not advance: an id is not above the one "
          "before it");
    }
    if (++count_ > kListedMax) {
      return Internal("the server's list of sessions has more than " + std::to_string(kListedMax) +
                      " entries");
    }
    last_ = id;
    return Status();
  }
  const std::string& last() const { return last_; }

 private:
  std::string last_;
  int64_t count_ = 0;
};

}  // namespace attend::client
