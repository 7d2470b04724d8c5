// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/lane/lane_memory.h"

#include <algorithm>
#include <string>

#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {
namespace {

constexpr int64_t kGrowthBytes = int64_t{16} << 20;  // allocation granularity
constexpr int64_t kKeepBytes = int64_t{1} << 30;
constexpr int64_t kKeepShare = 4;

int64_t RoundUp(int64_t bytes, int64_t unit) {
  return bytes > INT64_MAX - unit ? bytes : (bytes + unit - 1) / unit * unit;
}

}  // namespace

DevicePool::~DevicePool() {
  if (pool_ != nullptr) (void)cudaMemPoolDestroy(pool_);
}

Status DevicePool::Open(int device) {
  const std::string where = "making a memory pool on cuda:" + std::to_string(device);
  int pools = 0;
  ATTEND_RETURN_IF_ERROR(
      ToStatus(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device), where));
  if (pools == 0) return Status();
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaMemPoolCreate(&pool_, &properties), where));
  uint64_t keep = UINT64_MAX;  // freed memory stays here on any synchronisation
  return ToStatus(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep), where);
}

cudaError_t DevicePool::Allocate(int64_t bytes, cudaStream_t stream, void** memory) {
  const auto size = static_cast<size_t>(bytes);
  const cudaError_t error = pool_ == nullptr ? cudaMalloc(memory, size)
                                             : cudaMallocFromPoolAsync(memory, size, pool_, stream);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return error;
  }
  const MutexLock lock(mutex_);
  pieces_.emplace(*memory, bytes);
  used_bytes_ += bytes;
  return cudaSuccess;
}

void DevicePool::Free(void* memory, cudaStream_t stream) {
  {
    // Update the count first: once freed, the memory may go to another stream.
    const MutexLock lock(mutex_);
    const auto piece = pieces_.find(memory);
    used_bytes_ -= piece->second;
    pieces_.erase(piece);
  }
  (void)(pool_ == nullptr ? cudaFree(memory) : cudaFreeAsync(memory, stream));
}

void DevicePool::Trim() {
  if (pool_ != nullptr) (void)cudaMemPoolTrimTo(pool_, 0);
}

int64_t DevicePool::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_bytes_;
}

void LaneMemory::Use(cudaStream_t stream, int64_t keep_bytes) {
  stream_ = stream;
  keep_bytes_ = std::max(keep_bytes, kKeepBytes);
}

void LaneMemory::Release() {
  if (data_ != nullptr) pool_.Free(data_, stream_);
  data_ = nullptr;
  bytes_ = 0;
}

cudaError_t LaneMemory::Allocate(int64_t bytes) {
  void* memory = nullptr;
  cudaError_t error = pool_.Allocate(bytes, stream_, &memory);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaStreamSynchronize(stream_);  // completes this lane's frees
    pool_.Trim();
    error = pool_.Allocate(bytes, stream_, &memory);
  }
  if (error != cudaSuccess) return error;
  data_ = static_cast<char*>(memory);
  bytes_ = bytes;
  // The tile queue at the start of the workspace, which comes first.
  error = cudaMemsetAsync(data_, 0, static_cast<size_t>(std::min(bytes, kTileQueueBytes)), stream_);
  if (error != cudaSuccess) Release();
  return error;
}

// Allocates the new memory before it frees the old, so that the pool gets a large block back whole.
void LaneMemory::Shrink(int64_t bytes) {
  char* const large = data_;
  const int64_t large_bytes = bytes_;
  if (Allocate(bytes) == cudaSuccess) {
    pool_.Free(large, stream_);
  } else {
    data_ = large;
    bytes_ = large_bytes;
  }
}

Status LaneMemory::Reserve(int64_t bytes, cudaError_t* error) {
  *error = cudaSuccess;
  const int64_t least = RoundUp(std::max<int64_t>(bytes, 1), kGrowthBytes);
  if (bytes <= bytes_) {
    if (bytes_ > keep_bytes_ + kGrowthBytes && bytes < bytes_ / kKeepShare) {
      Shrink(std::max(least, keep_bytes_));
    }
    return Status();
  }
  if (bytes > device_.memory_bytes) {
    return ResourceExhausted("the batch needs " + std::to_string(bytes) + " bytes on " +
                             device_.name + ", which has " + std::to_string(device_.memory_bytes));
  }
  const int64_t before = bytes_;
  Release();  // first, so that old and new need not fit together
  const int64_t twice = std::min(RoundUp(2 * before, kGrowthBytes), kKeepBytes);
  *error = Allocate(std::max(least, twice));
  if (*error == cudaErrorMemoryAllocation && twice > least) *error = Allocate(least);
  if (*error == cudaSuccess) return Status();
  if (before > 0) (void)Allocate(before);
  return ToStatus(*error, "allocating " + std::to_string(bytes) + " bytes on " + device_.name);
}

}  // namespace attend::cuda
