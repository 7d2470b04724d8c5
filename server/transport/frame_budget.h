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
  // PINGs beyond those that answers allow.
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
  // A piece of a message with fewer bytes than this is small.
  static constexpr int64_t kSmallBytes = 32;

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

  // A call may send two WINDOW_UPDATE, and two small pieces: a message and an end.
  void CountCall() {
    small_pieces_ += 2;
    window_updates_ += 2;
  }
  // A frame of data with so many bytes was sent. It allows a WINDOW_UPDATE, one more for each
  // kBytesPerUpdate, and a PING, with which gRPC's clients for Go and Java measure its way.
  void CountSent(int64_t bytes) {
    ++data_pings_;
    unspent_ += bytes;
    window_updates_ += 1 + unspent_ / kBytesPerUpdate;
    unspent_ %= kBytesPerUpdate;
  }

 private:
  static constexpr int64_t kBytesPerUpdate = 512;

  static bool Take(TokenBucket& bucket, TimePoint now);

  TokenBucket pings_, resets_, settings_, empty_;
  int32_t newest_ = -1;  // stream
  bool leaves_out_ids_ = false;
  int continuations_ = 0;  // of the newest block
  // That may come beside what `empty_` allows. A piece that is not small allows a small one, as
  // some clients cut messages at 16 KiB.
  int64_t small_pieces_ = 0;
  int64_t data_pings_ = 0;
  int64_t window_updates_ = 8;
  int64_t unspent_ = 0;  // bytes sent that make no whole update so far
};

}  // namespace attend
