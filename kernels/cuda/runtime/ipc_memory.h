// SPDX-License-Identifier: Apache-2.0
//
// Memory and events of one GPU that other processes share through CUDA's interprocess handles.
// Imports of a handle are counted here, because CUDA maps an allocation only once per process, and
// drivers differ in their answer to a second request.
//
// Thread-safe. Calls may make the device the calling thread's current one.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/contract/backend.h"
#include "kernels/util/mutex.h"

namespace attend::cuda {

class IpcMemory {
 public:
  explicit IpcMemory(const DeviceInfo& device) : device_(device) {}  // which outlives it
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  // Backend's ImportMemory, ReleaseMemory and ImportEvent.
  Result<ImportedMemory> Import(std::string_view handle);
  void Release(char* data);
  Result<std::unique_ptr<DeviceEvent>> ImportEvent(std::string_view handle);

 private:
  struct Imported {
    ImportedMemory memory;
    int64_t users = 0;
  };

  Result<ImportedMemory> Map(std::string_view handle) const;

  const DeviceInfo& device_;
  Mutex mutex_;
  std::map<std::string, Imported, std::less<>> imported_ ATTEND_GUARDED_BY(mutex_);  // by handle
};

}  // namespace attend::cuda
