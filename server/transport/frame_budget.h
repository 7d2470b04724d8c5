// SPDX-License-Identifier: Apache-2.0
//
// How many frames a connection may send that cost its client little and the server something. What
// well-behaved clients send stays far below. Pure, and not thread-safe.

#pragma once

#include <cstdint>

#include "kernels/util/clock.h"
#include "server/limits/token_bucket.h"

namespace attend {

struct FrameRates {
  Rate pings{.per_second = 64, .burst = 512};
  // Cancelling clients send up to 100,000 at once.
  Rate resets{.per_second = 262144, .burst = 262144};
  Rate settings{.per_second = 16, .burst = 256};
  // SETTINGS apart: PRIORITY, unknown ones, WINDOW_UPDATE beyond what answers need, and pieces of
  // messages and of headers that bring next to nothing.
  Rate empty{.per_second = 4096, .burst = 16384};
};

class FrameBudget {
 public:
  // A piece of a message with fewer bytes than this is empty, except one that ends each call.
  static constexpr int64_t kEmptyBytes = 32;

  explicit FrameBudget(const FrameRates& rates = {})
      : pings_(rates.pings),
        resets_(rates.resets),
        settings_(rates.settings),
        empty_(rates.empty) {}

  // Each counts one frame and says whether it may still come.
  bool Ping(TimePoint now) { return Take(pings_, now); }
  bool Reset(TimePoint now) { return Take(resets_, now); }
  bool Settings(TimePoint now) { return Take(settings_, now); }
  bool Empty(TimePoint now) { return Take(empty_, now); }
  bool WindowUpdate(TimePoint now) {
    if (window_updates_ <= 0) return Empty(now);
    --window_updates_;
    return true;
  }

  // A call may send two WINDOW_UPDATE, and one for each of so many bytes that it is sent.
  void CountCall() { window_updates_ += 2; }
  void CountSent(int64_t bytes) {
    unspent_ += bytes;
    window_updates_ += unspent_ / kBytesPerUpdate;
    unspent_ %= kBytesPerUpdate;
  }

 private:
  static constexpr int64_t kBytesPerUpdate = 512;

  static bool Take(TokenBucket& bucket, TimePoint now) {
    if (bucket.Wait(now) > Duration::zero()) return false;
    bucket.Charge(1, now);
    return true;
  }

  TokenBucket pings_, resets_, settings_, empty_;
  int64_t window_updates_ = 8;
  int64_t unspent_ = 0;  // bytes sent that make no whole update so far
};

}  // namespace attend
