// SPDX-License-Identifier: Apache-2.0
//
// Token buckets for frames that cost the server more than the client. WINDOW_UPDATE is paid for by
// calls and by bytes sent, and draws on the empty-frame budget only beyond that.

#include "server/transport/frame_budget.h"

namespace attend {

bool FrameBudget::Take(TokenBucket& bucket, TimePoint now) {
  if (bucket.Wait(now) > Duration::zero()) return false;
  bucket.Charge(1, now);
  return true;
}

bool FrameBudget::Count(const nghttp2_frame_hd& head, TimePoint now) {
  const bool ack = (head.flags & NGHTTP2_FLAG_ACK) != 0;
  switch (head.type) {
    case NGHTTP2_PING:
      if (ack || data_pings_ <= 0) return Take(ack ? empty_ : pings_, now);
      --data_pings_;
      return true;
    case NGHTTP2_SETTINGS:
      return Take(ack ? empty_ : settings_, now);
    case NGHTTP2_RST_STREAM:
      return Take(resets_, now);
    case NGHTTP2_WINDOW_UPDATE:
      if (window_updates_ <= 0) return Empty(now);
      --window_updates_;
      return true;
    case NGHTTP2_DATA:
      if (head.length >= static_cast<size_t>(kSmallBytes)) {
        ++small_pieces_;
        return true;
      }
      if (small_pieces_ <= 0) return Empty(now);
      --small_pieces_;
      return true;
    case NGHTTP2_HEADERS:
      continuations_ = 0;
      if (head.stream_id <= newest_) return Empty(now);
      leaves_out_ids_ |= head.stream_id != newest_ + 2;
      newest_ = head.stream_id;
      return true;
    case NGHTTP2_CONTINUATION:
      return ++continuations_ <= kContinuationsMax && Empty(now);
    default:
      return Empty(now);
  }
}

}  // namespace attend
