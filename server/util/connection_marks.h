// SPDX-License-Identifier: Apache-2.0
//
// What has come over a connection that says whether it is a stranger's. Any thread.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace attend {

struct ConnectionMarks {
  std::string peer;  // as connections are counted by; set before others see the marks
  std::atomic<bool> called{false};  // a call of who is a caller still has been let in
  std::atomic<int64_t> watches{0};  // of health, open now
};

}  // namespace attend
