// SPDX-License-Identifier: Apache-2.0
//
// Waits of tests, which end even if what they wait for never comes.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string_view>
#include <thread>

namespace attend::test {

// Longer than anything takes on a busy machine under a sanitizer.
inline constexpr std::chrono::seconds kWaitMost{120};

// Waits until `holds()`. After kWaitMost the test fails at the caller's line, which names `what`,
// and goes on. Returns whether it held.
template <class Holds>
bool Await(std::string_view what, const Holds& holds, const char* file = __builtin_FILE(),
           int line = __builtin_LINE()) {
  const auto until = std::chrono::steady_clock::now() + kWaitMost;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= until) {
      ADD_FAILURE_AT(file, line) << "waited " << kWaitMost.count() << " s for: " << what;
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

}  // namespace attend::test
