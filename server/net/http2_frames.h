// SPDX-License-Identifier: Apache-2.0
//
// What a client's HTTP/2 frames may be before gRPC reads them. gRPC 1.51 keeps a header block of
// any length, in time that grows with its square, lets a client that never acknowledges its
// settings open any number of streams, works for frames that carry nothing, has no bound on the
// calls of all connections, and keeps what a call took for some time after its stream has ended.
// Looks at frames' heads only, of which there is one in 16 KiB or so. Pure.

#pragma once

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>

#include "server/net/heap_pressure.h"
#include "server/net/open_calls.h"
#include "server/util/clock.h"

namespace attend {

// Finds the heads of frames in what comes piece by piece.
class FrameHeads {
 public:
  static constexpr int kBytes = 9;

  // The first frame begins after that many bytes.
  explicit FrameHeads(int64_t skip) : skip_(skip) {}

  // Calls found(head) for each head that ends in `bytes`, until one says what is wrong.
  template <class Found>
  const char* Read(std::span<const uint8_t> bytes, const Found& found);
  static int32_t Length(const uint8_t* head) { return head[0] << 16 | head[1] << 8 | head[2]; }
  static int32_t Stream(const uint8_t* head) {
    return (head[5] & 0x7f) << 24 | head[6] << 16 | head[7] << 8 | head[8];
  }

 private:
  int64_t skip_;  // bytes until the next frame
  uint8_t head_[kBytes] = {};
  int8_t head_bytes_ = 0;
};

// Of what comes now and then: so many at once, and so many a second.
class FrameRate {
 public:
  FrameRate(int64_t most, int64_t per_second) : most_(most), per_second_(per_second) {}
  // Another one. False: one too many.
  bool Count(TimePoint now);

 private:
  const int64_t most_;
  const int64_t per_second_;
  int64_t frames_ = 0;
  TimePoint since_{};
};

class Http2Frames {
 public:
  struct Limits {
    int64_t streams = 1024;  // that may be opened before the settings are acknowledged
    // While the heap is short, a connection may begin so many calls a second more than it gets
    // answers, or fewer if it is very short. Null: it never is.
    std::shared_ptr<HeapPressure> heap;
    // Where the connection's open calls count. Null: nowhere.
    std::shared_ptr<OpenCalls::Peer> calls;
  };
  // Of one block of headers: gRPC itself takes 8 KiB, and says so to whoever sends a little more.
  static constexpr int64_t kHeaderBytesMax = int64_t{32} << 10;
  static constexpr int64_t kHeaderFramesMax = 16;
  // Of gRPC's memory a frame of DATA takes more than it brings, below this.
  static constexpr int64_t kDataBytesMin = 32;
  // Frames that carry neither headers nor so much data: so many at once, and so many a second.
  static constexpr int64_t kIdleFramesMax = 16384;
  static constexpr int64_t kIdleFramesPerSecond = 4096;
  // RST_STREAM of streams that are not open. A call that its client gives up as it begins is only
  // that, and often client and server see a deadline pass at once.
  static constexpr int64_t kResetsMax = 262144;
  static constexpr int64_t kResetsPerSecond = 262144;
  // A WINDOW_UPDATE counts as one of these unless so many bytes of answers were sent for it, or it
  // is one of so many for a frame of them, or for a call that begins: of its stream and of the
  // connection.
  static constexpr int64_t kBytesPerUpdate = 512;
  static constexpr int64_t kUpdatesPerFrame = 2;

  explicit Http2Frames(const Limits& limits) : limits_(limits) {}
  ~Http2Frames();  // its calls are open no longer
  Http2Frames(const Http2Frames&) = delete;
  Http2Frames& operator=(const Http2Frames&) = delete;

  // The next bytes of the connection, from its first on. Null, or what is wrong with them: the
  // connection is not to be read any further.
  const char* Read(std::span<const uint8_t> bytes, TimePoint now);
  // The next bytes that the server sends, on any one thread at a time, at once with Read. Before
  // the client can have them: what it does then may rest on them.
  void Written(std::span<const uint8_t> bytes);

 private:
  const char* Begin(const uint8_t* head, TimePoint now);
  const char* CountHeaders(uint8_t type, uint8_t flags, int32_t length);
  // Headers that begin a call, or that belong to one that is open or has ended.
  const char* CountCall(int32_t stream, TimePoint now);
  const char* CountUnanswered(TimePoint now);
  const char* CountReset(int32_t stream, TimePoint now);
  const char* CountUpdate(TimePoint now);
  const char* CountSmallData(uint8_t flags, TimePoint now);
  const char* CountIdle(TimePoint now);
  void CountWritten(const uint8_t* head);
  const char* Open(int32_t stream);
  bool Close(int32_t stream);  // false: it was not open

  const Limits limits_;
  FrameHeads read_{24};        // after the preface
  bool acknowledged_ = false;  // the settings
  int32_t last_stream_ = 0;
  int64_t streams_ = 0;       // opened before that
  int64_t begun_ = 0;         // calls, ever
  int64_t ends_ = 0;          // of their clients' sides, by DATA with next to nothing
  int64_t header_bytes_ = 0;  // of the block that is under way
  int64_t header_frames_ = 0;
  FrameRate idle_{kIdleFramesMax, kIdleFramesPerSecond};
  FrameRate resets_{kResetsMax, kResetsPerSecond};
  int64_t updates_ = 0;  // of windows, for what was sent
  int64_t calls_ = 0;    // begun in this second, while the heap was short
  int64_t answers_before_ = 0;
  TimePoint calls_since_{};

  FrameHeads written_{0};
  std::atomic<int64_t> answers_{0};  // frames of DATA
  std::atomic<int64_t> answer_bytes_{0};
  std::atomic<int64_t> refusals_{0};  // calls that ended without one
  int32_t answered_stream_ = 0;       // the last with DATA
  int32_t refused_stream_ = -1;       // the last of refusals_, until a reset

  std::mutex open_mutex_;
  absl::flat_hash_set<int32_t> open_;  // streams
};

template <class Found>
const char* FrameHeads::Read(std::span<const uint8_t> bytes, const Found& found) {
  while (!bytes.empty()) {
    if (skip_ > 0) {
      const size_t skipped = static_cast<size_t>(std::min<int64_t>(skip_, std::ssize(bytes)));
      skip_ -= static_cast<int64_t>(skipped);
      bytes = bytes.subspan(skipped);
      continue;
    }
    const size_t taken = std::min<size_t>(kBytes - head_bytes_, bytes.size());
    std::memcpy(head_ + head_bytes_, bytes.data(), taken);
    head_bytes_ = static_cast<int8_t>(head_bytes_ + taken);
    bytes = bytes.subspan(taken);
    if (head_bytes_ < kBytes) break;
    head_bytes_ = 0;
    skip_ = Length(head_);
    if (const char* const wrong = found(head_)) return wrong;
  }
  return nullptr;
}

}  // namespace attend
