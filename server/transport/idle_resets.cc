// SPDX-License-Identifier: Apache-2.0

#include "server/transport/idle_resets.h"

#include <algorithm>
#include <utility>

namespace attend {

std::string_view IdleResets::Next(std::string_view& bytes) {
  size_t passed = 0;  // from the front of `bytes`
  const auto take = [&](size_t count) {
    const std::string_view taken = bytes.substr(0, count);
    bytes.remove_prefix(count);
    return taken;
  };
  while (passed < bytes.size()) {
    const size_t here = bytes.size() - passed;
    if (left_ > 0) {
      if (left_out_ && passed > 0) return take(passed);
      const size_t count = std::min(left_, here);
      left_ -= count;
      left_out_ ? void(take(count)) : void(passed += count);
    } else if (head_bytes_ == 0 && here >= kHeadBytes) {
      if (Begin(bytes.data() + passed)) {
        left_ += kHeadBytes;
      } else {
        passed += kHeadBytes;
      }
    } else if (passed > 0) {
      return take(passed);
    } else {
      const std::string_view piece = take(std::min(kHeadBytes - head_bytes_, here));
      std::copy(piece.begin(), piece.end(), head_.begin() + head_bytes_);
      head_bytes_ += piece.size();
      if (head_bytes_ < kHeadBytes) continue;
      head_bytes_ = 0;
      if (!Begin(head_.data())) return {head_.data(), kHeadBytes};
    }
  }
  return take(passed);
}

bool IdleResets::Begin(const char* head) {
  const auto byte = [head](int i) { return uint32_t{static_cast<uint8_t>(head[i])}; };
  const uint32_t stream = (byte(5) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8)) & 0x7fffffff;
  left_ = byte(0) << 16 | byte(1) << 8 | byte(2);
  if (byte(3) == NGHTTP2_HEADERS) newest_ = std::max(newest_, stream);
  left_out_ = byte(3) == NGHTTP2_RST_STREAM && stream % 2 == 1 && stream > newest_ && left_ == 4;
  count_ += left_out_ ? 1 : 0;
  return left_out_;
}

int64_t IdleResets::TakeCount() { return std::exchange(count_, 0); }

}  // namespace attend
