// SPDX-License-Identifier: Apache-2.0
//
// How many frames a connection may send that cost its client little and the server something. What
// well-behaved clients send stays far below. Pure, and not thread-safe.

#pragma once

#include <nghttp2/nghttp2.h>

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

  // CONTINUATION of one block of headers.
  static constexpr int kContinuationsMax = 16;

  // Counts a frame that begins, and says whether it may come.
  bool Count(const nghttp2_frame_hd& head, TimePoint now);
  bool Empty(TimePoint now) { return Take(empty_, now); }
  // The latest that has begun; -1: none.
  int32_t newest_stream() const { return newest_; }
  // The stream is below one that has begun, and maybe none: the client leaves out ids.
  bool MayBeLeftOut(int32_t id) const { return leaves_out_ids_ && id < newest_; }

  // A call may end once, and send two WINDOW_UPDATE, and one for each of so many bytes that it is
  // sent.
  void CountCall() {
    ++ends_;
    window_updates_ += 2;
  }
  void CountSent(int64_t bytes) {
    unspent_ += bytes;
    window_updates_ += unspent_ / kBytesPerUpdate;
    unspent_ %= kBytesPerUpdate;
  }

 private:
  static constexpr int64_t kBytesPerUpdate = 512;

  static bool Take(TokenBucket& bucket, TimePoint now);

  TokenBucket pings_, resets_, settings_, empty_;
  int32_t newest_ = -1;  // stream
  bool leaves_out_ids_ = false;
  int continuations_ = 0;  // of the newest block
  int64_t ends_ = 0;       // frames of DATA that may end a call
  int64_t window_updates_ = 8;
  int64_t unspent_ = 0;  // bytes sent that make no whole update so far
};

}  // namespace attend
