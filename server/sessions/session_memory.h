// SPDX-License-Identifier: Apache-2.0
//
// The sessions of a server, the memory that holds them, and the thread that expires leases. No hold
// may be left at its end.

#pragma once

#include <memory>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "server/sessions/session_table.h"
#include "server/util/poll_thread.h"

namespace attend {

class SessionMemory {
 public:
  // `arenas`: of the devices, in the engine's order; null: that device has no sessions. `clock`
  // must outlive this.
  SessionMemory(std::vector<std::unique_ptr<DeviceArena>> arenas, const SessionOptions& options,
                const Clock& clock);

  SessionTable& table() { return *table_; }

 private:
  const std::vector<std::unique_ptr<DeviceArena>> arenas_;
  std::unique_ptr<SessionTable> table_;
  std::unique_ptr<PollThread> expiry_;
};

}  // namespace attend
