// SPDX-License-Identifier: Apache-2.0
//
// Takes memory of GPUs that clients lend (CUDA IPC): finds the device, has its backend open the
// handle, and looks that what the client says fits what there is. Thread-safe; calls may wait for a
// device.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"

namespace attend {

inline constexpr int kDeviceUuidBytes = 16;

// What a client says of memory that it lends; nothing of it has been looked at.
struct DeviceLoan {
  std::string device_uuid;
  std::string memory_handle;
  uint64_t offset = 0;  // of the lent bytes in the allocation
  uint64_t bytes = 0;
  std::string event_handle;  // empty: requests wait for nothing
};

struct ImportedMemory {
  int device = 0;  // index into the backends
  std::string device_name;
  char* allocation = nullptr;  // goes back to the backend
  char* data = nullptr;
  int64_t bytes = 0;
  std::unique_ptr<DeviceEvent> event;  // null: none
};

class DeviceImporter {
 public:
  // In the engine's order; they must outlive the importer.
  explicit DeviceImporter(std::vector<Backend*> backends) : backends_(std::move(backends)) {}

  // Whether any device takes other processes' memory.
  bool usable() const;

  // NOT_FOUND: this server does not have that GPU. INVALID_ARGUMENT names what is wrong. What the
  // backend says of the handles.
  Result<ImportedMemory> Import(const DeviceLoan& loan) const;
  // Nothing may use it any more.
  void Release(ImportedMemory memory) const;

 private:
  Result<ImportedMemory> Open(int device, const DeviceLoan& loan) const;

  const std::vector<Backend*> backends_;
};

}  // namespace attend
