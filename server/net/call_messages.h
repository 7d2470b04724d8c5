// SPDX-License-Identifier: Apache-2.0
//
// Tracks the open calls of one connection and the unfinished message on each. The transport buffers
// a message until it is complete, at the client's pace, so a slow client pins memory. gRPC prefixes
// each message with its length; the bytes after the prefix are only counted. Thread-safe.

#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/net/message_memory.h"

namespace attend {

class CallMessages {
 public:
  // A message that gains fewer bytes than this within the timeout, without finishing, has stalled.
  // The exception: clients interleave messages, so it has not stalled if the connection gains this
  // many bytes per unfinished message.
  static constexpr int64_t kProgressBytes = 4096;
  // A message may hold up to this many bytes beyond its own: the rest of the buffers it arrived in.
  static constexpr int64_t kBufferBytes = int64_t{64} << 10;

  // Adds received bytes to `memory` unless it is null.
  explicit CallMessages(std::shared_ptr<MessageMemory> memory = nullptr)
      : memory_(std::move(memory)) {}

  // May throw std::bad_alloc; nothing has changed then.
  void Open(int32_t stream);
  void Close(int32_t stream);
  // Accounts for the next bytes of a call's messages. `position`: bytes read from the connection so
  // far, these included.
  void Add(int32_t stream, std::span<const uint8_t> bytes, TimePoint now, int64_t position);

  // Flow control: the client may send this many more bytes on a call (stream 0: the connection).
  void Grant(int32_t stream, int64_t bytes);
  // The initial window: bytes that the client may send on each call before the first Grant.
  void SetFirstWindow(int64_t bytes);

  // True if a message has stalled for `timeout` although flow control let its client send. Call it
  // several times per timeout: it restarts the timeout of messages that wait for the server.
  bool Stall(TimePoint now, Duration timeout);
  // Restarts the timeout of all messages, after a time in which the server has read nothing.
  void Restart(TimePoint now);
  // Estimated memory held by unfinished messages, in bytes.
  int64_t Held();

 private:
  static constexpr int64_t kHttp2Window = 65535;  // until the server announces another
  static constexpr int8_t kPrefixBytes = 5;       // compression flag (1), length (4)

  struct Call {
    int64_t granted = 0;  // beyond the first window
    // The unfinished message:
    int64_t length = 0;
    int64_t came = 0;  // prefix included; 0: no message is unfinished
    int64_t marked = 0;
    TimePoint since;              // when `came` reached `marked`
    int64_t held = 0;             // with neighbouring bytes in the same buffers
    int64_t began = 0, read = 0;  // connection positions: its first byte, the last byte read
    // Bytes to the next step of the parser: one byte of the prefix, or the rest of the message.
    int64_t Left() const { return came < kPrefixBytes ? 1 : kPrefixBytes + length - came; }
  };

  void CountProgress(int64_t bytes, TimePoint now) ATTEND_REQUIRES(mutex_);
  void Begin(Call& call, TimePoint now, int64_t position) ATTEND_REQUIRES(mutex_);
  // Consumes the bytes that belong to the unfinished message.
  void Take(Call& call, std::span<const uint8_t>& bytes, TimePoint now) ATTEND_REQUIRES(mutex_);

  const std::shared_ptr<MessageMemory> memory_;
  Mutex mutex_;
  absl::flat_hash_map<int32_t, Call> calls_ ATTEND_GUARDED_BY(mutex_);
  int64_t window_ ATTEND_GUARDED_BY(mutex_) = kHttp2Window;  // of the connection
  int64_t first_window_ ATTEND_GUARDED_BY(mutex_) = kHttp2Window;
  int64_t position_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t under_way_ ATTEND_GUARDED_BY(mutex_) = 0;  // unfinished messages
  int64_t progress_ ATTEND_GUARDED_BY(mutex_) = 0;   // bytes of all calls since since_
  TimePoint since_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
