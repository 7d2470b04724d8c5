// SPDX-License-Identifier: Apache-2.0

#include "client/memory/cuda_driver.h"

#include <dlfcn.h>

#include <utility>

namespace attend::client {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kOutOfMemory = 2;

Status None(const std::string& why) {
  return Status(Code::kFailedPrecondition, "no GPU memory to lend: " + why);
}

// The driver is never unloaded: its threads would still be running its code.
Result<CudaDriver> Load() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    return None(std::string("this machine has no NVIDIA driver (") +
                (error == nullptr ? kLibrary : error) + ")");
  }
  CudaDriver driver;
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  find(driver.init, "cuInit");
  find(driver.device_get_count, "cuDeviceGetCount");
  find(driver.device_get, "cuDeviceGet");
  find(driver.device_get_uuid, "cuDeviceGetUuid");
  find(driver.primary_retain, "cuDevicePrimaryCtxRetain");
  find(driver.primary_release, "cuDevicePrimaryCtxRelease_v2");
  find(driver.push_current, "cuCtxPushCurrent_v2");
  find(driver.pop_current, "cuCtxPopCurrent_v2");
  find(driver.synchronize, "cuCtxSynchronize");
  find(driver.mem_alloc, "cuMemAlloc_v2");
  find(driver.mem_free, "cuMemFree_v2");
  find(driver.copy_to_device, "cuMemcpyHtoD_v2");
  find(driver.copy_to_host, "cuMemcpyDtoH_v2");
  find(driver.copy_async, "cuMemcpyAsync");
  find(driver.stream_synchronize, "cuStreamSynchronize");
  find(driver.stream_query, "cuStreamQuery");
  find(driver.stream_wait_event, "cuStreamWaitEvent");
  find(driver.address_range, "cuMemGetAddressRange_v2");
  find(driver.pointer_attribute, "cuPointerGetAttribute");
  find(driver.ipc_mem_handle, "cuIpcGetMemHandle");
  find(driver.ipc_event_handle, "cuIpcGetEventHandle");
  find(driver.event_create, "cuEventCreate");
  find(driver.event_record, "cuEventRecord");
  find(driver.event_destroy, "cuEventDestroy_v2");
  find(driver.error_name, "cuGetErrorName");
  if (missing != nullptr) {
    return None("the NVIDIA driver is too old: it has no " + std::string(missing));
  }
  const Status started = driver.Check(driver.init(0), "cuInit");
  if (!started.ok()) return None(started.message());
  int count = 0;
  if (driver.device_get_count(&count) != 0 || count == 0) return None("the driver finds no GPU");
  return driver;
}

}  // namespace

Result<const CudaDriver*> CudaDriver::Get() {
  static const attend::Result<CudaDriver> driver = Load();
  if (!driver.ok()) return driver.status();
  return &*driver;
}

Status CudaDriver::Check(Result result, const std::string& what) const {
  if (result == 0) return Status();
  const char* name = nullptr;
  if (error_name(result, &name) != 0 || name == nullptr) name = "an unknown error";
  const std::string text = what + ": " + name + " (" + std::to_string(result) + ")";
  return result == kOutOfMemory ? ResourceExhausted(text) : Internal(text);
}

}  // namespace attend::client
