// SPDX-License-Identifier: Apache-2.0
//
// Limits the frames of a connection that cost the client little and the server something. The
// traffic of well-behaved clients stays far below. Pure; not thread-safe.

#pragma once

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <cstdint>

#include "kernels/util/clock.h"
#include "server/limits/token_bucket.h"

namespace attend {

struct FrameRates {
  // PINGs beyond those that responses allow.
  Rate pings{.per_second = 64, .burst = 512};
  // Clients that cancel send up to 100,000 at once.
  Rate resets{.per_second = 262144, .burst = 262144};
  Rate settings{.per_second = 16, .burst = 256};
  // Acknowledgements, PRIORITY, unknown frames, WINDOW_UPDATE beyond what responses need, and
  // fragments of messages or headers that carry next to nothing.
  Rate empty{.per_second = 4096, .burst = 16384};
};

class FrameBudget {
 public:
  // A DATA frame with fewer bytes is small.
  static constexpr int64_t kSmallBytes = 32;

  explicit FrameBudget(const FrameRates& rates = {})
      : pings_(rates.pings),
        resets_(rates.resets),
        settings_(rates.settings),
        empty_(rates.empty) {}

  // CONTINUATION frames per header block.
  static constexpr int kContinuationsMax = 16;

  // Counts a frame that begins. Returns whether it is allowed.
  bool Count(const nghttp2_frame_hd& head, TimePoint now);
  bool Empty(TimePoint now) { return Take(empty_, now); }
  // The newest stream that has begun; -1: none.
  int32_t newest_stream() const { return newest_; }
  // Whether the stream may have been skipped: its id is below the newest, and the client skips ids.
  bool MayBeLeftOut(int32_t id) const { return leaves_out_ids_ && id < newest_; }

  // A call may send two WINDOW_UPDATE frames and two small DATA frames: a message and an end.
  void CountCall() {
    small_pieces_ += 2;
    window_updates_ += 2;
  }
  // A call has ended before its client was done, which may have filled the stream's window.
  void CountEarlyEnd(int64_t window_bytes) {
    small_pieces_ = std::max(small_pieces_, window_bytes / kLateBytes);
  }
  // A DATA frame with this many bytes was sent. It allows a WINDOW_UPDATE, one more for each
  // kBytesPerUpdate, and a PING, with which gRPC's clients for Go and Java measure the round trip.
  void CountSent(int64_t bytes) {
    data_pings_ = std::min(data_pings_ + 1, kDataPingsMax);
    unspent_ += bytes;
    window_updates_ += 1 + unspent_ / kBytesPerUpdate;
    unspent_ %= kBytesPerUpdate;
  }

 private:
  static constexpr int64_t kBytesPerUpdate = 512;
  static constexpr int64_t kDataPingsMax = 512;
  static constexpr int64_t kLateBytes = 8;  // of a frame that comes after its call's end

  static bool Take(TokenBucket& bucket, TimePoint now);

  TokenBucket pings_, resets_, settings_, empty_;
  int32_t newest_ = -1;  // stream id
  bool leaves_out_ids_ = false;
  int continuations_ = 0;  // of the newest header block
  // Small DATA frames allowed beyond `empty_`. A larger frame allows one, as some clients cut
  // messages at 16 KiB.
  int64_t small_pieces_ = 0;
  int64_t data_pings_ = 0;  // PINGs allowed beyond `pings_`
  int64_t window_updates_ = 8;
  int64_t unspent_ = 0;  // bytes sent that do not make a whole update yet
};

}  // namespace attend
