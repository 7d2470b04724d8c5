// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/session_memory.h"

#include <chrono>
#include <cstring>
#include <span>
#include <utility>

#include "kernels/util/host_mapping.h"
#include "kernels/util/thread_name.h"
#include "server/util/random_token.h"

namespace attend {
namespace {

// A lease ends at most so much late, if nobody names its session before.
constexpr std::chrono::seconds kExpireInterval(1);

void CopyOnHost(std::span<const HostPiece> pieces) {
  for (const HostPiece& piece : pieces) {
    std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  }
}

}  // namespace

Result<std::unique_ptr<SessionMemory>> SessionMemory::Make(const std::vector<DeviceInfo>& devices,
                                                           int64_t bytes,
                                                           const SessionOptions& options,
                                                           const Clock& clock) {
  std::unique_ptr<SessionMemory> made(new SessionMemory());
  std::vector<SessionDevice> memories(devices.size());
  for (size_t n = 0; n < devices.size(); ++n) {
    if (devices[n].kind != DeviceKind::kCpu) continue;
    const Result<void*> mapped = MapHostMemory(bytes);
    if (!mapped.ok()) return mapped.status();
    made->mapped_.push_back({*mapped, bytes});
    memories[n].memory = made->mapped_.back();
    memories[n].copy = CopyOnHost;
  }
  made->table_ = std::make_unique<SessionTable>(options, clock, RandomToken, memories);
  made->thread_ = std::thread([raw = made.get()] { raw->Run(); });
  return made;
}

SessionMemory::~SessionMemory() {
  if (thread_.joinable()) {
    {
      const MutexLock lock(mutex_);
      stop_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }
  table_.reset();
  for (const HostSpan& memory : mapped_) UnmapHostMemory(memory.data, memory.bytes);
}

void SessionMemory::Run() {
  NameThread("attend-leases");
  MutexLock lock(mutex_);
  while (!stop_) {
    wake_.WaitFor(mutex_, kExpireInterval);
    lock.Unlock();
    table_->Expire();
    lock.Lock();
  }
}

}  // namespace attend
