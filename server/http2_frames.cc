// SPDX-License-Identifier: Apache-2.0

#include "server/http2_frames.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace attend {
namespace {

constexpr uint8_t kData = 0, kHeaders = 1, kSettings = 4, kWindowUpdate = 8, kContinuation = 9;
constexpr uint8_t kAck = 0x1, kEndStream = 0x1, kEndHeaders = 0x4;

}  // namespace

const char* Http2Frames::Read(std::span<const uint8_t> bytes, TimePoint now) {
  while (!bytes.empty()) {
    if (skip_ > 0) {
      const size_t skipped = static_cast<size_t>(std::min<int64_t>(skip_, std::ssize(bytes)));
      skip_ -= static_cast<int64_t>(skipped);
      bytes = bytes.subspan(skipped);
      continue;
    }
    const size_t taken = std::min<size_t>(kHeadBytes - head_bytes_, bytes.size());
    std::memcpy(head_ + head_bytes_, bytes.data(), taken);
    head_bytes_ = static_cast<int8_t>(head_bytes_ + taken);
    bytes = bytes.subspan(taken);
    if (head_bytes_ < kHeadBytes) break;
    head_bytes_ = 0;
    if (const char* const wrong = Begin(now)) return wrong;
  }
  return nullptr;
}

const char* Http2Frames::Begin(TimePoint now) {
  length_ = head_[0] << 16 | head_[1] << 8 | head_[2];
  skip_ = length_;
  const uint8_t type = head_[3];
  const uint8_t flags = head_[4];
  switch (type) {
    case kHeaders:
    case kContinuation:
      return CountHeaders(type, flags);
    case kSettings:
      acknowledged_ |= (flags & kAck) != 0;
      return CountIdle(now);
    case kWindowUpdate:
      return nullptr;  // one for each piece of an answer that was read
    case kData:
      return length_ < kDataBytesMin && (flags & kEndStream) == 0 ? CountIdle(now) : nullptr;
    default:
      return CountIdle(now);
  }
}

const char* Http2Frames::CountHeaders(uint8_t type, uint8_t flags) {
  if (type == kHeaders) {
    header_bytes_ = 0;
    header_frames_ = 0;
    if (!acknowledged_ && ++streams_ > limits_.streams) {
      return "streams before the settings were acknowledged";
    }
  }
  header_bytes_ += length_;
  ++header_frames_;
  if (header_bytes_ > kHeaderBytesMax) return "headers above 32 KiB";
  if (header_frames_ > kHeaderFramesMax) return "headers in more than 16 frames";
  if ((flags & kEndHeaders) != 0) header_bytes_ = header_frames_ = 0;
  return nullptr;
}

const char* Http2Frames::CountIdle(TimePoint now) {
  const std::chrono::duration<double> since = now - idle_since_;
  const double back = std::min(since.count() * kIdleFramesPerSecond, 1.0 * kIdleFramesMax);
  if (back >= 1) {
    idle_frames_ = std::max<int64_t>(0, idle_frames_ - static_cast<int64_t>(back));
    // What is left of a frame counts next time.
    const std::chrono::duration<double> left((back - std::floor(back)) / kIdleFramesPerSecond);
    idle_since_ = now - std::chrono::duration_cast<Duration>(left);
  }
  return ++idle_frames_ > kIdleFramesMax ? "frames with next to nothing in them" : nullptr;
}

}  // namespace attend
