// SPDX-License-Identifier: Apache-2.0
//
// Checks a client's HTTP/2 frames before gRPC reads them. gRPC 1.51 keeps a header block of any
// length, in time that grows with its square; takes padding for headers; lets a client that never
// acknowledges its settings open any number of streams; does work for frames that carry nothing;
// has no bound on the calls of all connections; keeps a call's memory for some time after its
// stream has ended; and keeps what has come of a message for as long as its client wants. Reads
// only the heads of frames, about one in 16 KiB, and of messages, and headers where methods are
// told apart. Pure.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>

#include "kernels/util/clock.h"
#include "server/net/call_messages.h"
#include "server/net/connection_use.h"
#include "server/net/heap_pressure.h"
#include "server/net/method_headers.h"
#include "server/net/open_calls.h"

namespace attend {

// Finds the heads of frames in bytes that arrive piece by piece.
class FrameHeads {
 public:
  static constexpr int kBytes = 9;

  // The first frame begins after `skip` bytes.
  explicit FrameHeads(int64_t skip) : skip_(skip) {}

  // Calls found(head) for each head that ends in `bytes`, and payload(bytes) for what is between
  // heads, until one says what is wrong.
  template <class Found, class Payload>
  const char* Read(std::span<const uint8_t> bytes, const Found& found, const Payload& payload);
  static int32_t Length(const uint8_t* head) { return head[0] << 16 | head[1] << 8 | head[2]; }
  static int32_t Stream(const uint8_t* head) {
    return (head[5] & 0x7f) << 24 | head[6] << 16 | head[7] << 8 | head[8];
  }

 private:
  int64_t skip_;  // bytes until the next frame
  uint8_t head_[kBytes] = {};
  int8_t head_bytes_ = 0;
};

// A rate limit: a burst of some number, and so many a second.
class FrameRate {
 public:
  FrameRate(int64_t most, int64_t per_second) : most_(most), per_second_(per_second) {}
  // Counts one more. False: one too many.
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
    // While the heap is short, a connection may begin at most `streams` calls a second more than it
    // gets answers, and fewer if the heap is very short. Null: no limit.
    std::shared_ptr<HeapPressure> heap;
    // Where the connection's open calls are counted. Null: nowhere.
    std::shared_ptr<OpenCalls::Peer> calls;
    // Where what comes of messages is counted. Null: nowhere that others see.
    std::shared_ptr<ConnectionUse> use = {};
    // Methods whose calls may bring so much each. None: methods are not told apart. They must
    // outlive the connection.
    std::span<const MethodBound> method_bounds = {};
    // What is kept for as long as the connection is open.
    std::shared_ptr<const void> kept = {};
  };
  // Bytes of one block of headers. gRPC itself accepts 8 KiB, and answers clients that send a
  // little more.
  static constexpr int64_t kHeaderBytesMax = int64_t{32} << 10;
  static constexpr int64_t kHeaderFramesMax = 16;
  // A DATA frame with fewer bytes takes more of gRPC's memory than it brings.
  static constexpr int64_t kDataBytesMin = 32;
  // Frames that carry neither headers nor that much data: so many at once, and so many a second.
  static constexpr int64_t kIdleFramesMax = 16384;
  static constexpr int64_t kIdleFramesPerSecond = 4096;
  // RST_STREAM of streams that are not open. A call that its client gives up as it begins is only
  // that, and often client and server see a deadline pass at once.
  static constexpr int64_t kResetsMax = 262144;
  static constexpr int64_t kResetsPerSecond = 262144;
  // A WINDOW_UPDATE counts as one of these unless so many bytes of answers were sent for it, or it
  // is one of so many for each frame of them, or for each call that begins: of its stream and of
  // the connection.
  static constexpr int64_t kBytesPerUpdate = 512;
  static constexpr int64_t kUpdatesPerFrame = 2;

  explicit Http2Frames(const Limits& limits);
  ~Http2Frames();  // its calls no longer count as open
  Http2Frames(const Http2Frames&) = delete;
  Http2Frames& operator=(const Http2Frames&) = delete;

  // Takes the next bytes of the connection, from its first on. Returns null, or what is wrong with
  // them: the connection must then not be read any further.
  const char* Read(std::span<const uint8_t> bytes, TimePoint now);
  // Takes the next bytes that the server sends. One thread at a time, but concurrent with Read.
  // Call it before the client can have the bytes, because what it does next may depend on them.
  void Written(std::span<const uint8_t> bytes);

 private:
  const char* Begin(const uint8_t* head, TimePoint now);
  const char* CountHeaders(uint8_t type, uint8_t flags, int32_t length);
  // Counts headers that begin a call, or that belong to one that is open or has ended.
  const char* CountCall(int32_t stream, TimePoint now);
  const char* CountUnanswered(TimePoint now);
  const char* CountReset(int32_t stream, TimePoint now);
  const char* CountUpdate(TimePoint now);
  const char* CountData(const uint8_t* head, TimePoint now);
  const char* ReadPayload(std::span<const uint8_t> bytes, TimePoint now);
  void BoundStream();
  const char* CountIdle(TimePoint now);
  void CountWritten(const uint8_t* head);
  // Of a frame that says how much the client may send.
  void ReadGrant(std::span<const uint8_t> bytes);
  const char* Open(int32_t stream);
  bool Close(int32_t stream);  // false: it was not open

  const Limits limits_;
  FrameHeads read_{24};  // after the preface
  int64_t read_bytes_ = 0;
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

  std::optional<MethodHeaders> headers_;
  uint8_t reading_ = 0xff;  // what the frame is that comes; at first none, but the preface
  int32_t reading_stream_ = 0;

  FrameHeads written_{0};
  std::atomic<int64_t> answers_{0};  // frames of DATA
  std::atomic<int64_t> answer_bytes_{0};
  std::atomic<int64_t> refusals_{0};  // calls that ended without one
  int32_t answered_stream_ = 0;       // the last with DATA
  int32_t refused_stream_ = -1;       // the last of refusals_, until a reset
  uint8_t writing_ = 0;               // what the frame is that is sent
  int32_t writing_stream_ = 0;
  uint64_t grant_ = 0;       // what came last of it,
  int32_t grant_bytes_ = 0;  // which is so much

  const std::shared_ptr<CallMessages> messages_;
};

template <class Found, class Payload>
const char* FrameHeads::Read(std::span<const uint8_t> bytes, const Found& found,
                             const Payload& payload) {
  while (!bytes.empty()) {
    if (skip_ > 0) {
      const size_t skipped = static_cast<size_t>(std::min<int64_t>(skip_, std::ssize(bytes)));
      skip_ -= static_cast<int64_t>(skipped);
      if (const char* const wrong = payload(bytes.first(skipped))) return wrong;
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
