// SPDX-License-Identifier: Apache-2.0
//
// The idea: a message is late only if its client could have sent more. For each call, the smaller
// of the connection's and the call's flow-control window is the number of bytes the client may
// still send. If that is less than the next step needs (kProgressBytes or the rest of the message),
// the server is the slow side, and Stall restarts the timeout. Progress is marked every
// kProgressBytes, per message and, scaled by the number of unfinished messages, per connection; the
// later mark counts.
//
// Memory is an upper estimate, since the transport does not report its buffers: a message's bytes,
// plus up to kBufferBytes for each gap in which bytes of other calls came, but in total no more
// than all bytes since the oldest unfinished message began.

#include "server/net/call_messages.h"

#include <algorithm>

namespace attend {

void CallMessages::Open(int32_t stream) {
  const MutexLock lock(mutex_);
  calls_.try_emplace(stream);
}

void CallMessages::Close(int32_t stream) {
  const MutexLock lock(mutex_);
  const auto found = calls_.find(stream);
  if (found == calls_.end()) return;
  if (found->second.came > 0) --under_way_;
  calls_.erase(found);
}

void CallMessages::Add(int32_t stream, std::span<const uint8_t> bytes, TimePoint now,
                       int64_t position) {
  if (memory_ != nullptr) memory_->CountRead(std::ssize(bytes));
  const MutexLock lock(mutex_);
  position_ = position;
  window_ -= std::ssize(bytes);
  CountProgress(std::ssize(bytes), now);
  const auto found = calls_.find(stream);
  if (found == calls_.end()) return;
  Call& call = found->second;
  call.granted -= std::ssize(bytes);
  // Bytes of other calls in between share buffers with this message.
  const int64_t between = position == call.read ? 0 : position - std::ssize(bytes) - call.read;
  call.held += std::clamp<int64_t>(between, 0, kBufferBytes);
  call.read = position;
  while (!bytes.empty()) {
    if (call.came == 0) Begin(call, now, position - std::ssize(bytes));
    Take(call, bytes, now);
  }
}

void CallMessages::CountProgress(int64_t bytes, TimePoint now) {
  progress_ += bytes;
  if (progress_ < kProgressBytes * under_way_) return;
  progress_ = 0;
  since_ = now;
}

void CallMessages::Begin(Call& call, TimePoint now, int64_t position) {
  ++under_way_;
  call.length = call.marked = 0;
  call.since = now;
  call.held = kBufferBytes;
  call.began = position;
}

void CallMessages::Take(Call& call, std::span<const uint8_t>& bytes, TimePoint now) {
  const auto taken = std::min(call.Left(), static_cast<int64_t>(bytes.size()));
  // The first byte is the compression flag; it is shifted out by the four bytes of the length.
  if (call.came < kPrefixBytes) call.length = (call.length << 8 | bytes.front()) & 0xffffffff;
  call.came += taken;
  call.held += taken;
  bytes = bytes.subspan(static_cast<size_t>(taken));
  if (call.came < kPrefixBytes) return;
  if (call.came == kPrefixBytes + call.length) {
    call.came = 0;
    --under_way_;
  } else if (call.came - call.marked >= kProgressBytes) {
    call.marked = call.came;
    call.since = now;
  }
}

void CallMessages::Grant(int32_t stream, int64_t bytes) {
  const MutexLock lock(mutex_);
  if (stream == 0) {
    window_ += bytes;
    return;
  }
  const auto found = calls_.find(stream);
  if (found != calls_.end()) found->second.granted += bytes;
}

void CallMessages::SetFirstWindow(int64_t bytes) {
  const MutexLock lock(mutex_);
  first_window_ = bytes;
}

bool CallMessages::Stall(TimePoint now, Duration timeout) {
  const MutexLock lock(mutex_);
  for (auto& [stream, call] : calls_) {
    if (call.came == 0) continue;
    const int64_t window = std::min(window_, first_window_ + call.granted);
    if (window < std::min(call.Left(), kProgressBytes)) {
      call.since = now;
    } else if (now - std::max(call.since, since_) >= timeout) {
      return true;
    }
  }
  return false;
}

void CallMessages::Restart(TimePoint now) {
  const MutexLock lock(mutex_);
  since_ = now;
}

int64_t CallMessages::Held() {
  const MutexLock lock(mutex_);
  int64_t held = 0, oldest = position_;
  for (const auto& [stream, call] : calls_) {
    if (call.came == 0) continue;
    held += call.held;
    oldest = std::min(oldest, call.began);
  }
  // At most all bytes since the oldest message began, and the buffer that it began in.
  return held == 0 ? 0 : std::min(held, position_ - oldest + kBufferBytes);
}

}  // namespace attend
