// SPDX-License-Identifier: Apache-2.0
//
// Memory of an NVIDIA GPU that a server on the same host may compute in (CUDA IPC). Builds without
// CUDA; CudaDriver::Get says whether a GPU is available.
//
// CUDA does not define what happens to the server if memory is freed, or an event destroyed, while
// the server has it open. A lent CudaMemory is therefore shared with the SharedMemory, which keeps
// it until the server has closed it; SharedMemory::Release tells when that is.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/memory/cuda_driver.h"
#include "client/memory/device_memory.h"

namespace attend::client {

class CudaMemory final : public DeviceMemory {
 public:
  // Allocates memory on the first of these GPUs (DeviceInfo.uuid) that this process sees. NOT_FOUND
  // if it sees none of them.
  static Result<std::shared_ptr<CudaMemory>> Allocate(const std::vector<std::string>& uuids,
                                                      int64_t bytes);
  // Wraps memory from cudaMalloc or cuMemAlloc, or a part of it at a multiple of 256 bytes. The
  // caller keeps it until SharedMemory::Release has returned OK for every region that lends it.
  // INVALID_ARGUMENT: CUDA cannot share it, such as memory from stream-ordered pools
  // (cudaMallocAsync) or from cuMemCreate.
  static Result<std::shared_ptr<CudaMemory>> Wrap(void* data, int64_t bytes);
  ~CudaMemory() override;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // From now on, requests over this memory wait on the GPU for all work enqueued so far on `stream`
  // (a CUstream or cudaStream_t; null: the default one). The first call must come before the memory
  // is lent.
  Status Record(void* stream);

  std::byte* data() const override { return reinterpret_cast<std::byte*>(data_); }
  int64_t bytes() const override { return bytes_; }
  Status Write(int64_t offset, const void* from, int64_t bytes) override;
  Status Read(int64_t offset, void* to, int64_t bytes) override;
  Status Describe(v1::ImportCudaMemory* lent) const override;

 private:
  CudaMemory(const CudaDriver& driver, CudaDriver::Device device)
      : driver_(driver), device_(device) {}
  static Result<std::shared_ptr<CudaMemory>> On(const CudaDriver& driver,
                                                CudaDriver::Device device);
  Status CheckRange(int64_t offset, int64_t bytes) const;

  const CudaDriver& driver_;
  const CudaDriver::Device device_;
  CudaDriver::Context context_ = nullptr;  // the device's primary one
  CudaDriver::Pointer data_ = 0;
  int64_t bytes_ = 0;
  bool owned_ = false;
  CudaDriver::Event event_ = nullptr;  // once Record was called
};

// CudaMemory::Allocate, for callers that need only a DeviceMemory.
Result<std::shared_ptr<DeviceMemory>> LendableMemory(const std::vector<std::string>& uuids,
                                                     int64_t bytes);

}  // namespace attend::client
