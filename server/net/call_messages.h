// SPDX-License-Identifier: Apache-2.0
//
// The open calls of one connection, and the message that is under way on each. The transport keeps
// what has come of a message until it is whole, for as long as its client wants. Each message says
// its length first, so most of its bytes are only counted. Thread-safe.

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
  // A message that brings less than this, and not its end, in some time has stalled in it, unless
  // the connection brings so much for each message that is under way: clients send them in turn.
  static constexpr int64_t kProgressBytes = 4096;
  // A message takes up to so many bytes more than have come of it: the rest of the buffers that
  // they came in.
  static constexpr int64_t kBufferBytes = int64_t{64} << 10;

  // What is read counts in `memory`, unless that is null.
  explicit CallMessages(std::shared_ptr<MessageMemory> memory = nullptr)
      : memory_(std::move(memory)) {}

  // May throw std::bad_alloc, and has then done nothing.
  void Open(int32_t stream);
  void Close(int32_t stream);
  // The next bytes of a call's messages. `position`: how many bytes of the connection have been
  // read in all.
  void Add(int32_t stream, std::span<const uint8_t> bytes, TimePoint now, int64_t position);

  // The server lets its client send so many bytes more on a call, or, as 0, on the connection.
  void Grant(int32_t stream, int64_t bytes);
  // So many it may send on each call before it is granted more.
  void SetFirstWindow(int64_t bytes);

  // Whether a message has stalled for so long though its client could have sent more. Look several
  // times in that time: what waits for the server now is given it anew.
  bool Stall(TimePoint now, Duration timeout);
  // Messages have their time anew: nobody has read what came.
  void Restart(TimePoint now);
  // About how much memory messages take that are not whole.
  int64_t Held();

 private:
  static constexpr int64_t kHttp2Window = 65535;  // until the server says otherwise
  static constexpr int8_t kPrefixBytes = 5;       // whether it is compressed, and its length

  struct Call {
    int64_t granted = 0;  // beyond the first window
    // Of the message that is under way.
    int64_t length = 0;
    int64_t came = 0;  // prefix included; 0: none is under way
    int64_t marked = 0;
    TimePoint since;              // when it had brought as much as is marked
    int64_t held = 0;             // with what else is in the same buffers
    int64_t began = 0, read = 0;  // the positions of its beginning and of what came last
    // What must come before the next step.
    int64_t Left() const { return came < kPrefixBytes ? 1 : kPrefixBytes + length - came; }
  };

  void CountProgress(int64_t bytes, TimePoint now) ATTEND_REQUIRES(mutex_);
  void Begin(Call& call, TimePoint now, int64_t position) ATTEND_REQUIRES(mutex_);
  // Takes what belongs to the message under way.
  void Take(Call& call, std::span<const uint8_t>& bytes, TimePoint now) ATTEND_REQUIRES(mutex_);

  const std::shared_ptr<MessageMemory> memory_;
  Mutex mutex_;
  absl::flat_hash_map<int32_t, Call> calls_ ATTEND_GUARDED_BY(mutex_);
  int64_t window_ ATTEND_GUARDED_BY(mutex_) = kHttp2Window;  // of the connection
  int64_t first_window_ ATTEND_GUARDED_BY(mutex_) = kHttp2Window;
  int64_t position_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t under_way_ ATTEND_GUARDED_BY(mutex_) = 0;  // messages
  int64_t progress_ ATTEND_GUARDED_BY(mutex_) = 0;   // what all calls have brought
  TimePoint since_ ATTEND_GUARDED_BY(mutex_);        // from then on
};

}  // namespace attend
