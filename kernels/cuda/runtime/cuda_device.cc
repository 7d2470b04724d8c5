// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/runtime/cuda_status.h"

namespace attend {
namespace {

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

int CudaDeviceCount(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  (void)cudaGetLastError();  // or a later launch would report this error
  if (why == nullptr) return 0;
  int driver = 0;
  if (error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess) {
    *why = driver == 0 ? "no NVIDIA driver was found"
                       : "the NVIDIA driver supports CUDA " + VersionText(driver) +
                             ", this build needs " + CudaBuildVersion();
  } else if (error == cudaErrorNoDevice || error == cudaSuccess) {
    *why = "no CUDA device was found";
  } else {
    *why = cuda::ErrorText(error, "cudaGetDeviceCount");
  }
  return 0;
}

std::string CudaBuildVersion() { return VersionText(CUDART_VERSION); }

namespace cuda {

Result<DeviceInfo> ReadDeviceInfo(int index, const BackendOptions& options) {
  std::string why;
  const int count = CudaDeviceCount(&why);
  const std::string name = "cuda:" + std::to_string(index);
  if (index < 0 || index >= count) {
    if (count > 0) why = "this machine has " + std::to_string(count) + " GPUs";
    return Status(Code::kNotFound, "device " + name + ": " + why);
  }
  cudaDeviceProp properties;
  ATTEND_RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties of " + name));
  DeviceInfo info;
  info.kind = DeviceKind::kCuda;
  info.index = index;
  info.name = name;
  info.description = properties.name;
  info.compute_capability = properties.major * 10 + properties.minor;
  info.units = properties.multiProcessorCount;
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.uuid.assign(properties.uuid.bytes, sizeof(properties.uuid.bytes));
  info.workspace_bytes_max = std::min(options.workspace_bytes_max, info.memory_bytes);
  if (info.compute_capability < kComputeCapabilityMin) {
    return Unimplemented("device " + name + " (" + info.description + ") has compute capability " +
                         std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                         ", this build needs at least 8.0");
  }
  return info;
}

cudaError_t ReadBlockBytesMax(int* bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace cuda
}  // namespace attend
