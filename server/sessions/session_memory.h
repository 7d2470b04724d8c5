// SPDX-License-Identifier: Apache-2.0
//
// The sessions of a server, the memory that holds them, and the thread that expires leases.

#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/sessions/session_table.h"

namespace attend {

class SessionMemory {
 public:
  // `arenas`: of the devices, in the engine's order; null: that device has no sessions. `clock`
  // must outlive this.
  SessionMemory(std::vector<std::unique_ptr<DeviceArena>> arenas, const SessionOptions& options,
                const Clock& clock);
  ~SessionMemory();  // no hold may be left
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  SessionTable& table() { return *table_; }

 private:
  void Run();

  const std::vector<std::unique_ptr<DeviceArena>> arenas_;
  const Clock& clock_;
  std::unique_ptr<SessionTable> table_;
  Mutex mutex_;
  CondVar wake_;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend
