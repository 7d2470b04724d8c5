// SPDX-License-Identifier: Apache-2.0
//
// The sessions of a server with the memory that they are in, and the thread that ends leases.

#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/sessions/session_table.h"
#include "server/util/clock.h"

namespace attend {

class SessionMemory {
 public:
  // Maps `bytes` of the host's memory for each CPU among `devices`; the system provides it when it
  // is first used. `clock` must outlive this.
  static Result<std::unique_ptr<SessionMemory>> Make(const std::vector<DeviceInfo>& devices,
                                                     int64_t bytes, const SessionOptions& options,
                                                     const Clock& clock);
  ~SessionMemory();  // no hold is left
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  SessionTable& table() { return *table_; }

 private:
  SessionMemory() = default;
  void Run();

  std::vector<HostSpan> mapped_;
  std::unique_ptr<SessionTable> table_;
  Mutex mutex_;
  CondVar wake_;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attend
