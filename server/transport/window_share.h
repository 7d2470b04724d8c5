// SPDX-License-Identifier: Apache-2.0
//
// How large a connection's receive window is. Bytes that wait in sockets take half as long to read
// while they are in the processor's cache, so connections with large messages share what may wait.
// Each has at least kBytesMin, and what is under way from its client on a path of kPathBytesPerUs.

#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <utility>

namespace attend {

class WindowShare {
 public:
  static constexpr int32_t kBytesMin = 1 << 20;

  // `busy` counts the connections with large messages, over all loops; must outlive it.
  WindowShare(std::atomic<int64_t>& busy, int64_t round_trip_us)
      : busy_(busy), path_bytes_(kPathBytesPerUs * round_trip_us) {}
  ~WindowShare() { SetLarge(false); }
  WindowShare(const WindowShare&) = delete;
  WindowShare& operator=(const WindowShare&) = delete;

  // Whether the connection's newest message is large.
  void SetLarge(bool large) {
    if (std::exchange(large_, large) == large) return;
    busy_.fetch_add(large ? 1 : -1, std::memory_order_relaxed);
  }
  // For a connection with a large message. `most` is the limit.
  int32_t Bytes(int64_t most) const {
    const auto busy = static_cast<uint64_t>(busy_.load(std::memory_order_relaxed));
    // A power of two, so that it rarely changes.
    const auto part = static_cast<int64_t>(std::bit_floor(kAllBytes / busy));
    return static_cast<int32_t>(std::min(most, std::max({part, int64_t{kBytesMin}, path_bytes_})));
  }

 private:
  static constexpr uint64_t kAllBytes = 8 << 20;
  static constexpr int64_t kPathBytesPerUs = 2000;

  std::atomic<int64_t>& busy_;
  const int64_t path_bytes_;
  bool large_ = false;
};

}  // namespace attend
