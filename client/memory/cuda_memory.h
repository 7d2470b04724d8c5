// SPDX-License-Identifier: Apache-2.0
//
// GPU memory that a server on the same host may compute in (CUDA IPC). Builds without CUDA;
// CudaDriver::Get tells whether a GPU is available.
//
// CUDA does not define what happens to the server if memory is freed, or an event destroyed, while
// the server has it open. The SharedMemory therefore shares ownership of a lent CudaMemory until
// the server has closed it; SharedMemory::Release tells when that is.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/memory/cuda_driver.h"
#include "client/memory/device_memory.h"
#include "kernels/util/mutex.h"

namespace attend::client {

class CudaMemory final : public DeviceMemory {
 public:
  // Allocates memory on the first of these GPUs (DeviceInfo.uuid) that this process sees.
  // NOT_FOUND: it sees none of them.
  static Result<std::shared_ptr<CudaMemory>> Allocate(const std::vector<std::string>& uuids,
                                                      int64_t bytes);
  // Allocates memory on this process's GPU of that ordinal, with an event, as after Record.
  static Result<std::shared_ptr<CudaMemory>> AllocateOn(int ordinal, int64_t bytes);
  // Wraps memory from cudaMalloc or cuMemAlloc, or a part of it at a multiple of 256 bytes. The
  // caller must keep it until SharedMemory::Release has returned OK for every region that lends it.
  // INVALID_ARGUMENT: CUDA cannot share it, such as memory from stream-ordered pools
  // (cudaMallocAsync) or from cuMemCreate.
  static Result<std::shared_ptr<CudaMemory>> Wrap(void* data, int64_t bytes);
  ~CudaMemory() override;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  // From now on, requests over this memory wait on the GPU for all work enqueued so far on `stream`
  // (a CUstream or cudaStream_t; null: the default stream). The first call must precede lending.
  Status Record(void* stream);
  // Makes later work on `stream` wait for everything that the last Record waits for.
  Status Await(void* stream);
  // Makes requests over this memory wait for the work enqueued so far on `stream`, in addition to
  // that of all streams joined before. Enqueues nothing if the stream is known to be idle. The
  // memory must have an event.
  Status Join(void* stream);

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
  Status Reserve(int64_t bytes);
  Status MakeEvent();
  Status CheckRange(int64_t offset, int64_t bytes) const;

  const CudaDriver& driver_;
  const CudaDriver::Device device_;
  CudaDriver::Context context_ = nullptr;  // the device's primary context
  CudaDriver::Pointer data_ = 0;
  int64_t bytes_ = 0;
  bool owned_ = false;
  Mutex join_mutex_;  // from a stream's wait for the event to the event's next record
  CudaDriver::Event event_ = nullptr;  // null until Record
};

// 16 bytes, as DeviceInfo.uuid. INVALID_ARGUMENT: this process sees no GPU of that ordinal.
Result<std::string> CudaUuid(int ordinal);
// Enqueues a copy on a stream of that GPU (null: the default stream). Each address is of this GPU
// or of the host; host memory must stay valid until CudaSynchronize has returned.
Status CudaCopy(int ordinal, void* to, const void* from, int64_t bytes, void* stream);
Status CudaSynchronize(int ordinal, void* stream);

// CudaMemory::Allocate, for callers that need only a DeviceMemory.
Result<std::shared_ptr<DeviceMemory>> LendableMemory(const std::vector<std::string>& uuids,
                                                     int64_t bytes);

}  // namespace attend::client
