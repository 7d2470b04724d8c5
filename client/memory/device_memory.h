// SPDX-License-Identifier: Apache-2.0
//
// Device memory of this process that it can lend to a server on its host (SharedMemory::Lend).
// Thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/util/status.h"

namespace attend::v1 {
class ImportCudaMemory;
}  // namespace attend::v1

namespace attend::client {

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // A device address, not readable by the host.
  virtual std::byte* data() const = 0;
  virtual int64_t bytes() const = 0;
  // Copy from and to host memory, within bytes(); the copy is complete on return.
  virtual Status Write(int64_t offset, const void* from, int64_t bytes) = 0;
  virtual Status Read(int64_t offset, void* to, int64_t bytes) = 0;
  // Fills in the fields with which a server opens the memory.
  virtual Status Describe(v1::ImportCudaMemory* lent) const = 0;
};

}  // namespace attend::client
