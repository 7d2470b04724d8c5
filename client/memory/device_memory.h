// SPDX-License-Identifier: Apache-2.0
//
// Memory of a device that this process has and can lend to a server on its host
// (SharedMemory::Lend). Thread-safe.

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

  // The device's address: not for the host to read.
  virtual std::byte* data() const = 0;
  virtual int64_t bytes() const = 0;
  // From and to memory of the host, within bytes(); there when they return.
  virtual Status Write(int64_t offset, const void* from, int64_t bytes) = 0;
  virtual Status Read(int64_t offset, void* to, int64_t bytes) = 0;
  // How a server finds it.
  virtual Status FillLoan(v1::ImportCudaMemory* loan) const = 0;
};

}  // namespace attend::client
