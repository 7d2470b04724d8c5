// SPDX-License-Identifier: Apache-2.0

#include "server/transport/frame_cutter.h"

#include <algorithm>

namespace attend {

std::string_view FrameCutter::Next(std::string_view& bytes) {
  const auto take = [&](size_t count) {
    const std::string_view taken = bytes.substr(0, count);
    bytes.remove_prefix(count);
    return taken;
  };
  begins_ = left_ == 0;
  if (begins_ && bytes_count_ == 0 && bytes.size() >= kHeadBytes) {
    Begin(bytes.data());
    const size_t here = std::min(left_, bytes.size() - kHeadBytes);
    left_ -= here;
    return take(kHeadBytes + here);
  }
  if (!begins_) {
    const std::string_view piece = take(std::min(left_, bytes.size()));
    left_ -= piece.size();
    return piece;
  }
  const std::string_view piece = take(std::min(kHeadBytes - bytes_count_, bytes.size()));
  std::copy(piece.begin(), piece.end(), bytes_.begin() + bytes_count_);
  bytes_count_ += piece.size();
  if (bytes_count_ < kHeadBytes) return {};
  bytes_count_ = 0;
  Begin(bytes_.data());
  return {bytes_.data(), kHeadBytes};
}

void FrameCutter::Begin(const char* head) {
  const auto byte = [head](int i) { return uint32_t{static_cast<uint8_t>(head[i])}; };
  left_ = head_.length = byte(0) << 16 | byte(1) << 8 | byte(2);
  head_.type = static_cast<uint8_t>(byte(3));
  head_.flags = static_cast<uint8_t>(byte(4));
  head_.stream_id =
      static_cast<int32_t>((byte(5) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8)) & 0x7fffffff);
}

}  // namespace attend
