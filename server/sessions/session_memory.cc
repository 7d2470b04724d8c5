// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/session_memory.h"

#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "server/util/random_token.h"

namespace attend {
namespace {

// The most by which a lease may end late, if no call names or uses its session.
constexpr std::chrono::seconds kExpireInterval(1);

// Debug builds fill freed pages with a bit pattern that is NaN in every dtype, so that reading one
// shows in the answer. On a device the pattern is copied from a host block that all pages share.
SessionDevice DeviceOf(DeviceArena* arena, [[maybe_unused]] int64_t page_bytes_max) {
  SessionDevice device{arena, {}};
#ifndef NDEBUG
  if (arena == nullptr) return device;
  if (arena->on_host()) {
    device.on_free = [](char* data, int64_t bytes) {
      std::memset(data, 0xff, static_cast<size_t>(bytes));
    };
    return device;
  }
  const auto nan = std::make_shared<const std::string>(static_cast<size_t>(page_bytes_max), '\xff');
  device.on_free = [arena, nan](char* data, int64_t bytes) {
    const HostPiece piece{nan->data(), data, bytes};
    (void)arena->Copy({&piece, 1});  // a lost device is not read any more
  };
#endif
  return device;
}

}  // namespace

SessionMemory::SessionMemory(std::vector<std::unique_ptr<DeviceArena>> arenas,
                             const SessionOptions& options, const Clock& clock)
    : arenas_(std::move(arenas)) {
  std::vector<SessionDevice> devices;
  for (const auto& arena : arenas_) {
    devices.push_back(DeviceOf(arena.get(), options.slab_bytes));
  }
  table_ = std::make_unique<SessionTable>(options, clock, RandomToken, devices);
  expiry_ = std::make_unique<PollThread>("attend-leases", kExpireInterval, clock,
                                         [this] { table_->Expire(); });
}

}  // namespace attend
