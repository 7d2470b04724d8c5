// SPDX-License-Identifier: Apache-2.0
//
// Imports GPU memory lent by clients (CUDA IPC): finds the device, lets its backend open the
// handle, and checks the client's claims against the allocation. Thread-safe; calls may wait for a
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

// A client's description of the memory it lends. Unchecked.
struct ImportRequest {
  std::string device_uuid;
  std::string memory_handle;
  uint64_t offset = 0;  // of the lent bytes in the allocation
  uint64_t bytes = 0;
  std::string event_handle;  // empty: requests need not wait
};

struct DeviceImport {
  int device = 0;  // index into the backends
  std::string device_name;
  char* allocation = nullptr;  // to be released by the backend
  char* data = nullptr;
  int64_t bytes = 0;
  std::unique_ptr<DeviceEvent> event;  // null: none
};

class DeviceImporter {
 public:
  // `backends` are in the engine's order and must outlive the importer.
  explicit DeviceImporter(std::vector<Backend*> backends) : backends_(std::move(backends)) {}

  // Whether any device can import memory of other processes.
  bool usable() const;

  // NOT_FOUND: this server does not have that GPU. INVALID_ARGUMENT names the bad field. Otherwise
  // the backend's error about the handles.
  Result<DeviceImport> Import(const ImportRequest& request) const;
  // The memory must no longer be in use.
  void Release(DeviceImport memory) const;

 private:
  Result<DeviceImport> Open(int device, const ImportRequest& request) const;

  const std::vector<Backend*> backends_;
};

}  // namespace attend
