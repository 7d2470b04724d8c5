// SPDX-License-Identifier: Apache-2.0
//
// The device memory of lanes. A DevicePool is CUDA's stream-ordered pool of one device; it keeps
// what it has taken from the driver. A LaneMemory is one lane's piece of it, which grows in stream
// order. One thread at a time for each LaneMemory; the pool is thread-safe.
//
// Two things may still wait, on the thread that calls Reserve. Taking memory from the driver that
// the pool never had before takes about a millisecond for 256 MiB; other lanes keep running. Only
// if the driver has none, the lane's stream is synchronised, and memory that the pool holds is
// given back and requested again. Without pools (some virtual GPUs) every growth waits for the
// device.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <unordered_map>

#include "kernels/contract/select.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

namespace attend::cuda {

class DevicePool {
 public:
  DevicePool() = default;
  ~DevicePool();  // after the memory taken from it
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  // Call first. Makes a pool of its own and does not use the device's default pool, on which other
  // users in the process may have set limits.
  Status Open(int device);

  cudaError_t Allocate(int64_t bytes, cudaStream_t stream, void** memory);
  void Free(void* memory, cudaStream_t stream);
  void Trim();  // gives unused memory back to the driver

  // Allocated and not yet freed by callers; streams may still use what is freed.
  int64_t used_bytes() const;
  // If not, every Free waits for the whole device.
  bool in_stream_order() const { return pool_ != nullptr; }

 private:
  cudaMemPool_t pool_ = nullptr;  // null: the device has no pools
  mutable Mutex mutex_;
  std::unordered_map<void*, int64_t> pieces_ ATTEND_GUARDED_BY(mutex_);
  int64_t used_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
};

class LaneMemory {
 public:
  // Both must outlive it. `device` bounds what a batch may request.
  LaneMemory(const DeviceInfo& device, DevicePool& pool) : device_(device), pool_(pool) {}
  ~LaneMemory() { Release(); }
  LaneMemory(const LaneMemory&) = delete;
  LaneMemory& operator=(const LaneMemory&) = delete;

  // Call before Reserve: sets the stream in whose order memory is allocated and freed, and how much
  // is always kept. The stream must outlive this, and everything that used the memory must have
  // ended when Reserve is called again.
  void Use(cudaStream_t stream, int64_t keep_bytes);

  // Makes it at least `bytes`, 256-byte aligned, with the first kTileQueueBytes zero; use it in
  // order with the stream. Memory that is too small at least doubles. Memory that is far too large
  // is given up, so that one large batch does not keep other lanes from growing. Not OK
  // (RESOURCE_EXHAUSTED, or CUDA's error, which is also in `*error`): the memory is as it was, or
  // smaller.
  Status Reserve(int64_t bytes, cudaError_t* error);

  // Call before the stream is destroyed.
  void Release();

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  cudaError_t Allocate(int64_t bytes);
  void Shrink(int64_t bytes);

  const DeviceInfo& device_;
  DevicePool& pool_;
  cudaStream_t stream_ = nullptr;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t keep_bytes_ = 0;
};

}  // namespace attend::cuda
