// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/ipc_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/runtime/cuda_event.h"
#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {
namespace {

constexpr uintptr_t kAlignment = 256;

Status CheckHandle(const char* what, std::string_view handle, size_t bytes) {
  if (handle.size() == bytes) return Status();
  return InvalidArgument(std::string(what) + " handle has " + std::to_string(handle.size()) +
                         " bytes, must have " + std::to_string(bytes));
}

// Translates CUDA's refusal of a handle into a status.
Status Refused(cudaError_t error, const std::string& where) {
  (void)cudaGetLastError();
  const std::string text = ErrorText(error, where);
  switch (error) {
    case cudaErrorMemoryAllocation:
      return ResourceExhausted(text);
    case cudaErrorAlreadyMapped:
      return Status(Code::kAlreadyExists, text + ": this process has already mapped it");
    case cudaErrorDeviceUninitialized:  // "invalid device context"
      return InvalidArgument(text + ": the process that made a handle cannot open it itself");
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorInvalidDevice:
      return InvalidArgument(text + ": the memory is on a GPU that this one cannot reach");
    case cudaErrorNotSupported:
      return Unimplemented(text + ": this system does not share GPU memory");
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorMapBufferObjectFailed:
      return InvalidArgument(text +
                             ": it was freed, its process has ended or is not on this machine, or "
                             "it is not a handle");
    default:
      return Internal(text);
  }
}

// The allocation that contains an address, as reported by the driver: the caller's size is not
// trusted.
CUresult RangeOf(void* data, ImportedMemory* range) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                             3020, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return CUDA_ERROR_NOT_FOUND;
  }
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult result = reinterpret_cast<decltype(&cuMemGetAddressRange)>(function)(
      &base, &bytes, reinterpret_cast<CUdeviceptr>(data));
  if (result != CUDA_SUCCESS) return result;
  // From the address on: the handle's allocation may be part of a larger mapping.
  const size_t before = reinterpret_cast<CUdeviceptr>(data) - base;
  if (before > bytes) return CUDA_ERROR_INVALID_VALUE;
  *range = {static_cast<char*>(data), static_cast<int64_t>(bytes - before)};
  return CUDA_SUCCESS;
}

}  // namespace

Result<ImportedMemory> IpcMemory::Map(std::string_view handle) const {
  const std::string where = "opening memory of another process on " + device_.name;
  cudaIpcMemHandle_t opaque;
  std::memcpy(&opaque, handle.data(), sizeof(opaque));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, opaque, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return Refused(error, where);
  cudaPointerAttributes attributes;
  const cudaError_t asked = cudaPointerGetAttributes(&attributes, data);
  ImportedMemory memory;
  const CUresult ranged = asked == cudaSuccess ? RangeOf(data, &memory) : CUDA_SUCCESS;
  Status status;
  if (asked != cudaSuccess) {
    status = Refused(asked, where);
  } else if (attributes.type != cudaMemoryTypeDevice || attributes.device != device_.index) {
    status = InvalidArgument(where + ": the memory is not on " + device_.name);
  } else if (ranged != CUDA_SUCCESS) {
    status = Internal(where + ": the driver does not say how large it is (error " +
                      std::to_string(ranged) + ")");
  } else if (reinterpret_cast<uintptr_t>(data) % kAlignment != 0) {
    status = InvalidArgument(where + ": it does not begin on a boundary of " +
                             std::to_string(kAlignment) + " bytes");
  }
  if (status.ok()) return memory;
  (void)cudaIpcCloseMemHandle(data);
  return status;
}

Result<ImportedMemory> IpcMemory::Import(std::string_view handle) {
  ATTEND_RETURN_IF_ERROR(CheckHandle("the memory's", handle, sizeof(cudaIpcMemHandle_t)));
  const MutexLock lock(mutex_);
  auto found = imported_.find(handle);
  if (found == imported_.end()) {
    ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_.index), "using " + device_.name));
    const Result<ImportedMemory> memory = Map(handle);
    if (!memory.ok()) return memory.status();
    found = imported_.emplace(std::string(handle), Imported{*memory, 0}).first;
  }
  ++found->second.users;
  return found->second.memory;
}

void IpcMemory::Release(char* data) {
  const MutexLock lock(mutex_);
  const auto found = std::find_if(imported_.begin(), imported_.end(), [data](const auto& each) {
    return each.second.memory.data == data;
  });
  if (found == imported_.end() || --found->second.users > 0) return;
  imported_.erase(found);
  (void)cudaSetDevice(device_.index);
  (void)cudaIpcCloseMemHandle(data);
  (void)cudaGetLastError();
}

Result<std::unique_ptr<DeviceEvent>> IpcMemory::ImportEvent(std::string_view handle) {
  ATTEND_RETURN_IF_ERROR(CheckHandle("the event's", handle, sizeof(cudaIpcEventHandle_t)));
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_.index), "using " + device_.name));
  cudaIpcEventHandle_t opaque;
  std::memcpy(&opaque, handle.data(), sizeof(opaque));
  cudaEvent_t event = nullptr;
  const cudaError_t error = cudaIpcOpenEventHandle(&event, opaque);
  if (error != cudaSuccess) {
    return Refused(error, "opening an event of another process on " + device_.name);
  }
  return std::unique_ptr<DeviceEvent>(std::make_unique<CudaEvent>(event));
}

}  // namespace attend::cuda
