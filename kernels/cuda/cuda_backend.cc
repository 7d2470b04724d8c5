// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/cuda/completion_poller.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_lane.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/lane_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pinned_ranges.h"

namespace attend {
namespace cuda {
namespace {

// Whether what is registered lies at the same address on the device: so wherever Linux runs on
// x86-64 or Arm.
bool RegisteredIsMapped(int device) {
  int same = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && same != 0;
}

// Page-locked memory that every GPU of the process can copy from at bus speed, and can read and
// write from kernels. What there is of it stands in `pinned`.
class PinnedAllocator : public HostAllocator {
 public:
  PinnedAllocator(int device, PinnedRanges& pinned)
      : device_(device), registered_is_mapped_(RegisteredIsMapped(device)), pinned_(pinned) {}

  Result<void*> Allocate(int64_t bytes) override {
    if (bytes < 0) {
      return InvalidArgument("host block of " + std::to_string(bytes) + " bytes, must be >= 0");
    }
    const std::string where = "page-locking " + std::to_string(bytes) + " bytes of host memory";
    ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), where));
    void* data = nullptr;
    const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    const cudaError_t error =
        cudaHostAlloc(&data, size, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return ToStatus(error, where);
    }
    pinned_.Add(data, bytes);
    return data;
  }

  void Free(void* data, int64_t) override {
    if (data == nullptr) return;
    pinned_.Remove(data);
    (void)cudaSetDevice(device_);
    (void)cudaFreeHost(data);
    (void)cudaGetLastError();
  }

  Status Register(void* data, int64_t bytes) override {
    if (data == nullptr || bytes <= 0) {
      return InvalidArgument("memory to page-lock has " + std::to_string(bytes) +
                             " bytes, must have at least 1");
    }
    const std::string where = "page-locking " + std::to_string(bytes) + " mapped bytes";
    ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), where));
    const cudaError_t error = cudaHostRegister(data, static_cast<size_t>(bytes),
                                               cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return ToStatus(error, where);
    }
    if (registered_is_mapped_) pinned_.Add(data, bytes);
    return Status();
  }

  void Unregister(void* data, int64_t) override {
    pinned_.Remove(data);
    (void)cudaSetDevice(device_);
    (void)cudaHostUnregister(data);
    (void)cudaGetLastError();
  }

 private:
  const int device_;
  const bool registered_is_mapped_;
  PinnedRanges& pinned_;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(DeviceInfo info)
      : info_(std::move(info)), allocator_(info_.index, pinned_), poller_(info_.index) {}

  Status Open() { return pool_.Open(info_.index); }

  const DeviceInfo& info() const override { return info_; }
  HostAllocator& host_allocator() override { return allocator_; }

  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) override {
    if (options.workspace_bytes < 0) {
      return InvalidArgument("lane workspace is " + std::to_string(options.workspace_bytes) +
                             " bytes, must be at least 0");
    }
    return CudaLane::Make({info_, poller_, pool_, pinned_}, options);
  }

 private:
  const DeviceInfo info_;
  PinnedRanges pinned_;
  PinnedAllocator allocator_;
  DevicePool pool_;
  CompletionPoller poller_;
};

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<Backend>> MakeCudaBackend(int index, const BackendOptions& options) {
  Result<DeviceInfo> info = cuda::ReadDeviceInfo(index, options);
  if (!info.ok()) return info.status();
  const std::string where = "opening " + info->name;
  cudaError_t error = cudaSetDevice(index);
  // Now rather than in the first request: the context, and the kernels' code on the device.
  if (error == cudaSuccess) error = cuda::LoadKernels();
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Internal(cuda::ErrorText(error, where));
  }
  auto backend = std::make_unique<cuda::CudaBackend>(*std::move(info));
  ATTEND_RETURN_IF_ERROR(backend->Open());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace attend
