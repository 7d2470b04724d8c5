// SPDX-License-Identifier: Apache-2.0
//
// Marks on a connection that tell whether it is still unauthenticated. Any thread.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace attend {

struct ConnectionMarks {
  std::string peer;  // the key by which connections are counted; set before the marks are shared
  std::atomic<bool> called{false};  // a call of a caller that is still valid was accepted
  std::atomic<int64_t> watches{0};  // open health watches
};

}  // namespace attend
