// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/session_memory.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "kernels/util/thread_name.h"
#include "server/util/random_token.h"

namespace attend {
namespace {

// A lease ends at most so much late, if nobody names its session before.
constexpr std::chrono::seconds kExpireInterval(1);

#ifndef NDEBUG
// NaN in every dtype: an answer that read a free page shows it.
void Poison(char* data, int64_t bytes) { std::memset(data, 0xff, static_cast<size_t>(bytes)); }
#endif

// Debug builds poison what becomes free in host memory.
SessionDevice DeviceOf(DeviceArena* arena) {
  SessionDevice device{arena, {}};
#ifndef NDEBUG
  if (arena != nullptr && arena->on_host()) device.on_free = Poison;
#endif
  return device;
}

}  // namespace

SessionMemory::SessionMemory(std::vector<std::unique_ptr<DeviceArena>> arenas,
                             const SessionOptions& options, const Clock& clock)
    : arenas_(std::move(arenas)), clock_(clock) {
  std::vector<SessionDevice> devices;
  for (const auto& arena : arenas_) devices.push_back(DeviceOf(arena.get()));
  table_ = std::make_unique<SessionTable>(options, clock, RandomToken, devices);
  thread_ = std::thread([this] { Run(); });
}

SessionMemory::~SessionMemory() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.NotifyOne();
  thread_.join();
}

void SessionMemory::Run() {
  NameThread("attend-leases");
  MutexLock lock(mutex_);
  while (!stop_) {
    const TimePoint until = clock_.Now() + kExpireInterval;
    lock.Unlock();
    table_->Expire();
    lock.Lock();
    while (!stop_ && clock_.WaitUntil(wake_, mutex_, until)) {
    }
  }
}

}  // namespace attend
