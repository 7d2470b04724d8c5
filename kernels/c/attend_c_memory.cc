// SPDX-License-Identifier: Apache-2.0
//
// The C ABI's memory functions and its last error.

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "kernels/c/attend_c.h"
#include "kernels/c/attend_c_status.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/runtime/device_scope.h"

namespace attend {
namespace {

thread_local std::string last_error;

Status NotNull(const char* field, const void* value) {
  return value == nullptr ? InvalidArgument(std::string(field) + " is NULL") : Status();
}

Status CheckBytes(int64_t bytes) {
  if (bytes >= 0) return Status();
  return InvalidArgument("bytes is " + std::to_string(bytes) + ", must be at least 0");
}

// Calls `function` with `device` current; `what` names it in the error.
template <class Function>
Status OnDevice(int32_t device, const std::string& what, Function function) {
  const std::string where = what + " on cuda:" + std::to_string(device);
  const cuda::DeviceScope scope(device);
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(scope.error(), where));
  const cudaError_t error = function();
  if (error != cudaSuccess) (void)cudaGetLastError();
  return cuda::ToStatus(error, where);
}

Status DeviceCount(int32_t* count) {
  ATTEND_RETURN_IF_ERROR(NotNull("count", count));
  *count = 0;
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    SetLastError(cuda::ErrorText(error, "counting devices"));
    return Status();
  }
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(error, "counting devices"));
  *count = found;
  return Status();
}

Status Malloc(int32_t device, int64_t bytes, void** data) {
  ATTEND_RETURN_IF_ERROR(NotNull("data", data));
  ATTEND_RETURN_IF_ERROR(CheckBytes(bytes));
  *data = nullptr;
  if (bytes == 0) return Status();
  return OnDevice(device, "allocating " + std::to_string(bytes) + " bytes",
                  [&] { return cudaMalloc(data, static_cast<size_t>(bytes)); });
}

Status Free(int32_t device, void* data) {
  if (data == nullptr) return Status();
  return OnDevice(device, "freeing", [&] { return cudaFree(data); });
}

Status Memcpy(int32_t device, void* to, const void* from, int64_t bytes, int32_t kind,
              void* stream) {
  ATTEND_RETURN_IF_ERROR(CheckBytes(bytes));
  if (kind < ATTEND_HOST_TO_DEVICE || kind > ATTEND_DEVICE_TO_DEVICE) {
    return InvalidArgument("kind is " + std::to_string(kind) + ", must be in [1, 3]");
  }
  if (bytes == 0) return Status();
  ATTEND_RETURN_IF_ERROR(NotNull("to", to));
  ATTEND_RETURN_IF_ERROR(NotNull("from", from));
  return OnDevice(device, "copying " + std::to_string(bytes) + " bytes", [&] {
    return cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), static_cast<cudaMemcpyKind>(kind),
                           static_cast<cudaStream_t>(stream));
  });
}

Status Memset(int32_t device, void* data, int32_t value, int64_t bytes, void* stream) {
  ATTEND_RETURN_IF_ERROR(CheckBytes(bytes));
  if (value < 0 || value > 255) {
    return InvalidArgument("value is " + std::to_string(value) + ", must be in [0, 255]");
  }
  if (bytes == 0) return Status();
  ATTEND_RETURN_IF_ERROR(NotNull("data", data));
  return OnDevice(device, "filling " + std::to_string(bytes) + " bytes", [&] {
    return cudaMemsetAsync(data, value, static_cast<size_t>(bytes),
                           static_cast<cudaStream_t>(stream));
  });
}

Status Synchronize(int32_t device, void* stream) {
  return OnDevice(device, "waiting",
                  [&] { return cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); });
}

static_assert(ATTEND_HOST_TO_DEVICE == int{cudaMemcpyHostToDevice});
static_assert(ATTEND_DEVICE_TO_HOST == int{cudaMemcpyDeviceToHost});
static_assert(ATTEND_DEVICE_TO_DEVICE == int{cudaMemcpyDeviceToDevice});

}  // namespace

int32_t Return(const Status& status) {
  if (status.ok()) return ATTEND_OK;
  SetLastError(status.message());
  return static_cast<int32_t>(status.code());
}

void SetLastError(std::string message) { last_error = std::move(message); }

}  // namespace attend

int32_t attend_device_count(int32_t* count) { return attend::Return(attend::DeviceCount(count)); }

int32_t attend_malloc(int32_t device, int64_t bytes, void** data) {
  return attend::Return(attend::Malloc(device, bytes, data));
}

int32_t attend_free(int32_t device, void* data) {
  return attend::Return(attend::Free(device, data));
}

int32_t attend_memcpy(int32_t device, void* to, const void* from, int64_t bytes, int32_t kind,
                      void* stream) {
  return attend::Return(attend::Memcpy(device, to, from, bytes, kind, stream));
}

int32_t attend_memset(int32_t device, void* data, int32_t value, int64_t bytes, void* stream) {
  return attend::Return(attend::Memset(device, data, value, bytes, stream));
}

int32_t attend_synchronize(int32_t device, void* stream) {
  return attend::Return(attend::Synchronize(device, stream));
}

const char* attend_last_error(void) { return attend::last_error.c_str(); }
