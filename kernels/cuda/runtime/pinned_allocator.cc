// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/pinned_allocator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/util/host_mapping.h"

namespace attend::cuda {
namespace {

bool HasSameAddress(int device) {
  int same = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && same != 0;
}

}  // namespace

PinnedAllocator::PinnedAllocator(int device, PinnedRanges& pinned)
    : device_(device), same_address_(HasSameAddress(device)), pinned_(pinned) {}

Result<void*> PinnedAllocator::Allocate(int64_t bytes) {
  Result<void*> data = MapHostMemory(bytes);
  if (!data.ok()) return data;
  const Status locked = Register(*data, std::max<int64_t>(bytes, 1));
  if (locked.ok()) return data;
  UnmapHostMemory(*data, bytes);
  return locked;
}

void PinnedAllocator::Free(void* data, int64_t bytes) {
  if (data == nullptr) return;
  Unregister(data, bytes);
  UnmapHostMemory(data, bytes);
}

Status PinnedAllocator::Register(void* data, int64_t bytes) {
  if (data == nullptr || bytes <= 0) {
    return InvalidArgument("memory to page-lock has " + std::to_string(bytes) +
                           " bytes, must have at least 1");
  }
  const std::string where = "page-locking " + std::to_string(bytes) + " bytes of host memory";
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), where));
  const cudaError_t error = cudaHostRegister(data, static_cast<size_t>(bytes),
                                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return ToStatus(error, where);
  }
  if (same_address_) pinned_.Add(data, bytes);
  return Status();
}

void PinnedAllocator::Unregister(void* data, int64_t) {
  pinned_.Remove(data);
  (void)cudaSetDevice(device_);
  (void)cudaHostUnregister(data);
  (void)cudaGetLastError();
}

}  // namespace attend::cuda
