// SPDX-License-Identifier: Apache-2.0
//
// CUDA GPUs as devices of the C ABI.

#include <cuda_runtime_api.h>

#include <string>

#include "kernels/c/attend_c.h"
#include "kernels/c/device.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/runtime/device_scope.h"

namespace attend::c {
namespace {

static_assert(ATTEND_HOST_TO_DEVICE == int{cudaMemcpyHostToDevice});
static_assert(ATTEND_DEVICE_TO_HOST == int{cudaMemcpyDeviceToHost});
static_assert(ATTEND_DEVICE_TO_DEVICE == int{cudaMemcpyDeviceToDevice});

std::vector<cuda::LaunchItem> LaunchItems(std::span<const Item> items) {
  std::vector<cuda::LaunchItem> launched;
  for (const Item& item : items) {
    launched.push_back({.kernel = item.kernel, .attention = item.attention, .config = item.config});
  }
  return launched;
}

// Calls `function` with the device current; `what` names the operation in an error.
template <class Function>
Status OnDevice(int32_t index, const std::string& what, Function function) {
  const std::string where = what + " on cuda:" + std::to_string(index);
  const cuda::DeviceScope scope(index);
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(scope.error(), where));
  const cudaError_t error = function();
  if (error != cudaSuccess) (void)cudaGetLastError();
  return cuda::ToStatus(error, where);
}

cuda::BackwardItem Launched(const BackwardItem& item) {
  return {.kernel = item.forward.kernel,
          .attention = item.forward.attention,
          .gradients = item.gradients,
          .room_for_turns = true};
}

cudaStream_t Stream(void* stream) { return static_cast<cudaStream_t>(stream); }

class Cuda : public Device {
 public:
  // The caller provides the workspace, so no limit applies to it.
  Result<DeviceInfo> Info(int32_t index) const override {
    DeviceInfo device;
    device.kind = DeviceKind::kCuda;
    device.index = index;
    device.name = "cuda:" + std::to_string(index);
    device.workspace_bytes_max = INT64_MAX;
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    }
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return Internal(cuda::ErrorText(error, "reading device " + device.name));
    }
    device.compute_capability = major * 10 + minor;
    return device;
  }

  MemoryTraits Traits(const Attention& attention) const override {
    return cuda::TraitsOf(attention);
  }
  MemoryTraits Traits(const BackwardItem& item) const override {
    return {.not_tma = cuda::WhyNotTma(item.forward.attention, item.gradients)};
  }

  std::vector<std::string_view> Variants(KernelId kernel, const Problem& problem) const override {
    std::vector<std::string_view> names;
    for (const cuda::FlashVariant& variant : cuda::VariantsFor(kernel, problem)) {
      names.push_back(variant.name);
    }
    if (names.empty()) names.push_back(kOnlyVariant);
    return names;
  }

  Result<int64_t> WorkspaceBytes(std::span<const Item> items) const override {
    return cuda::BatchWorkspaceBytes(LaunchItems(items));
  }

  Status Run(int32_t index, std::span<const Item> items, void* workspace, int64_t workspace_bytes,
             void* stream) const override {
    const cuda::DeviceScope scope(index);
    ATTEND_RETURN_IF_ERROR(cuda::ToStatus(scope.error(), "changing the device"));
    return cuda::LaunchBatch(LaunchItems(items), workspace, workspace_bytes, Stream(stream));
  }

  // The backward pass writes anywhere in its workspace, so the bytes that must stay zero precede
  // it.
  Result<int64_t> WorkspaceBytes(const BackwardItem& item) const override {
    const cuda::BackwardItem launched = Launched(item);
    const Result<int64_t> bytes = cuda::BackwardWorkspaceBytes({&launched, 1});
    if (!bytes.ok()) return bytes;
    if (*bytes > INT64_MAX - cuda::kTileQueueBytes) {
      return InvalidArgument("bytes of workspace overflow 64 bits: " + std::to_string(*bytes) +
                             " for the backward pass");
    }
    return *bytes + cuda::kTileQueueBytes;
  }
  Status Run(int32_t index, const BackwardItem& item, void* workspace, int64_t workspace_bytes,
             void* stream) const override {
    const cuda::BackwardItem launched = Launched(item);
    const cuda::DeviceScope scope(index);
    ATTEND_RETURN_IF_ERROR(cuda::ToStatus(scope.error(), "changing the device"));
    return cuda::LaunchBackward({&launched, 1},
                                static_cast<char*>(workspace) + cuda::kTileQueueBytes,
                                workspace_bytes - cuda::kTileQueueBytes, Stream(stream));
  }

  Result<void*> Malloc(int32_t index, int64_t bytes) const override {
    void* data = nullptr;
    ATTEND_RETURN_IF_ERROR(OnDevice(index, "allocating " + std::to_string(bytes) + " bytes",
                                    [&] { return cudaMalloc(&data, static_cast<size_t>(bytes)); }));
    return data;
  }

  Status Free(int32_t index, void* data) const override {
    return OnDevice(index, "freeing", [&] { return cudaFree(data); });
  }

  Status Memcpy(int32_t index, void* to, const void* from, int64_t bytes, int32_t kind,
                void* stream) const override {
    return OnDevice(index, "copying " + std::to_string(bytes) + " bytes", [&] {
      return cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                             static_cast<cudaMemcpyKind>(kind), Stream(stream));
    });
  }

  Status Memset(int32_t index, void* data, int32_t value, int64_t bytes,
                void* stream) const override {
    return OnDevice(index, "filling " + std::to_string(bytes) + " bytes", [&] {
      return cudaMemsetAsync(data, value, static_cast<size_t>(bytes), Stream(stream));
    });
  }

  Status Synchronize(int32_t index, void* stream) const override {
    return OnDevice(index, "waiting", [&] { return cudaStreamSynchronize(Stream(stream)); });
  }
};

}  // namespace

const Device& CudaDevice() {
  static const Cuda device;
  return device;
}

Result<int32_t> CudaDevices(std::string* why) {
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    *why = cuda::ErrorText(error, "counting devices");
    return 0;
  }
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(error, "counting devices"));
  return found;
}

}  // namespace attend::c
