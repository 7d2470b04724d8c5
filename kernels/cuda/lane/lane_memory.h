// SPDX-License-Identifier: Apache-2.0
//
// The device memory of lanes. A DevicePool is CUDA's stream-ordered pool of one device, which keeps
// what it has once taken from the driver; a LaneMemory is one lane's piece of it, which grows in
// stream order. One thread at a time for each LaneMemory; the pool is thread-safe.
//
// What may still wait, on the thread that calls Reserve: taking memory from the driver that the
// pool never had before (about a millisecond for 256 MiB; other lanes run on), and, only when there
// is none, a synchronisation of the lane's stream before memory that the pool holds is given back
// and asked for again. Without pools (some virtual GPUs) every growth waits for the device.

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

  // Before anything else. Of the device's pool nothing is used: others of the process may have
  // bounds of their own there.
  Status Open(int device);

  cudaError_t Allocate(int64_t bytes, cudaStream_t stream, void** memory);
  void Free(void* memory, cudaStream_t stream);
  void Trim();  // gives back to the driver what nobody uses

  // Allocated and not freed, as far as callers are concerned: streams may still use what is freed.
  int64_t used_bytes() const;
  // Or else every Free waits for the whole device.
  bool in_stream_order() const { return pool_ != nullptr; }

 private:
  cudaMemPool_t pool_ = nullptr;  // null: the device has no pools
  mutable Mutex mutex_;
  std::unordered_map<void*, int64_t> pieces_ ATTEND_GUARDED_BY(mutex_);
  int64_t used_bytes_ ATTEND_GUARDED_BY(mutex_) = 0;
};

class LaneMemory {
 public:
  // Which must outlive it. `device` bounds what a batch may ask for.
  LaneMemory(const DeviceInfo& device, DevicePool& pool) : device_(device), pool_(pool) {}
  ~LaneMemory() { Release(); }
  LaneMemory(const LaneMemory&) = delete;
  LaneMemory& operator=(const LaneMemory&) = delete;

  // Before Reserve: the stream in whose order memory comes and goes, and how much is kept in any
  // case. The stream must outlive this, and everything that used the memory must have ended when
  // Reserve is called again.
  void Use(cudaStream_t stream, int64_t keep_bytes);

  // At least `bytes`, 256-byte aligned, the first kTileQueueBytes zero; to be used in order with
  // the stream. Small memory grows to twice what it was at least; what is far too large is given
  // up, so that one large batch does not keep other lanes from growing. Not OK (RESOURCE_EXHAUSTED,
  // or what CUDA said, in `*error` too): the memory is as it was, or smaller.
  Status Reserve(int64_t bytes, cudaError_t* error);

  // Before the stream goes.
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
