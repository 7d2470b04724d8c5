// SPDX-License-Identifier: Apache-2.0
//
// What a client's HTTP/2 frames may be before gRPC reads them. gRPC 1.51 keeps a header block of
// any length, in time that grows with its square, lets a client that never acknowledges its
// settings open any number of streams, and works for frames that carry nothing. Looks at frames'
// heads only, of which there is one in 16 KiB or so. Pure.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "server/clock.h"

namespace attend {

class Http2Frames {
 public:
  struct Limits {
    int64_t streams = 1024;  // that may be opened before the settings are acknowledged
  };
  // Of one block of headers: gRPC itself takes 8 KiB, and says so to whoever sends a little more.
  static constexpr int64_t kHeaderBytesMax = int64_t{32} << 10;
  static constexpr int64_t kHeaderFramesMax = 16;
  // Of gRPC's memory a frame of DATA takes more than it brings, below this.
  static constexpr int64_t kDataBytesMin = 32;
  // Frames that carry neither headers nor so much data: so many at once, and so many a second.
  static constexpr int64_t kIdleFramesMax = 16384;
  static constexpr int64_t kIdleFramesPerSecond = 4096;

  Http2Frames() = default;
  explicit Http2Frames(const Limits& limits) : limits_(limits) {}

  // The next bytes of the connection, from its first on. Null, or what is wrong with them: the
  // connection is not to be read any further.
  const char* Read(std::span<const uint8_t> bytes, TimePoint now);

 private:
  static constexpr int kHeadBytes = 9;

  const char* Begin(TimePoint now);  // a frame, whose head is in head_
  const char* CountHeaders(uint8_t type, uint8_t flags);
  const char* CountIdle(TimePoint now);

  Limits limits_;
  int64_t skip_ = 24;  // bytes until the next frame: of the preface, then of a frame
  uint8_t head_[kHeadBytes] = {};
  int8_t head_bytes_ = 0;
  bool acknowledged_ = false;  // the settings
  int32_t length_ = 0;
  int64_t streams_ = 0;       // opened before that
  int64_t header_bytes_ = 0;  // of the block that is under way
  int64_t header_frames_ = 0;
  int64_t idle_frames_ = 0;
  TimePoint idle_since_{};
};

}  // namespace attend
