// SPDX-License-Identifier: Apache-2.0

#include "server/net/call_messages.h"

#include <algorithm>
#include <utility>

namespace attend {
namespace {

constexpr char kWrong[] = "a message far above what its method takes";

}  // namespace

void CallMessages::Open(int32_t stream) {
  const MutexLock lock(mutex_);
  calls_.try_emplace(stream);
}

bool CallMessages::Close(int32_t stream) {
  const MutexLock lock(mutex_);
  return calls_.erase(stream) > 0;
}

int64_t CallMessages::CloseAll() {
  const MutexLock lock(mutex_);
  return std::ssize(std::exchange(calls_, {}));
}

void CallMessages::Bound(int32_t stream, const MethodBound& bound) {
  const MutexLock lock(mutex_);
  const auto found = calls_.find(stream);
  if (found == calls_.end()) return;
  Call& call = found->second;
  // Trailers leave it as it is.
  if (call.bytes_left != kUnbounded || call.message_max != kUnbounded) return;
  call.bytes_left = bound.bytes_max;
  call.message_max = std::min(bound.bytes_max, bound.message_max);
}

const char* CallMessages::Add(int32_t stream, std::span<const uint8_t> bytes, TimePoint now) {
  const MutexLock lock(mutex_);
  window_ -= std::ssize(bytes);
  const auto found = calls_.find(stream);
  if (found == calls_.end()) return nullptr;
  Call& call = found->second;
  call.granted -= std::ssize(bytes);
  if (call.bytes_left != kUnbounded) call.bytes_left -= std::ssize(bytes);
  if (call.bytes_left < 0) return kWrong;
  while (!bytes.empty()) {
    if (!Take(call, bytes, now)) return kWrong;
  }
  return nullptr;
}

bool CallMessages::Take(Call& call, std::span<const uint8_t>& bytes, TimePoint now) {
  if (call.came == 0) {
    call.length = call.marked = 0;
    call.since = now;
  }
  const auto taken = std::min(call.Left(), static_cast<int64_t>(bytes.size()));
  // The first byte is no part of the length, which has 32 bits after the last.
  if (call.came < kPrefixBytes) call.length = (call.length << 8 | bytes.front()) & 0xffffffff;
  call.came += taken;
  bytes = bytes.subspan(static_cast<size_t>(taken));
  if (call.came < kPrefixBytes) return true;
  if (call.length > call.message_max) return false;
  if (call.came == kPrefixBytes + call.length) {
    call.came = 0;
  } else if (call.came - call.marked >= kProgressBytes) {
    call.marked = call.came;
    call.since = now;
  }
  return true;
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
    } else if (now - call.since >= timeout) {
      return true;
    }
  }
  return false;
}

}  // namespace attend
