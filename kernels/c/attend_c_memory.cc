// SPDX-License-Identifier: Apache-2.0
//
// The memory functions of the C ABI, and attend_last_error.

#include <string>
#include <utility>

#include "kernels/c/attend_c.h"
#include "kernels/c/attend_c_params.h"
#include "kernels/c/attend_c_status.h"
#include "kernels/c/device.h"

namespace attend {
namespace {

thread_local std::string last_error;

}  // namespace

int32_t Return(const Status& status) {
  if (status.ok()) return ATTEND_OK;
  SetLastError(status.message());
  return static_cast<int32_t>(status.code());
}

void SetLastError(std::string message) { last_error = std::move(message); }

namespace c {
namespace {

Status NotNull(const char* field, const void* value) {
  return value == nullptr ? InvalidArgument(std::string(field) + " is NULL") : Status();
}

Status CheckBytes(int64_t bytes) {
  if (bytes >= 0) return Status();
  return InvalidArgument("bytes is " + std::to_string(bytes) + ", must be at least 0");
}

// Calls `function` with the device of that index.
template <class Function>
Status On(int32_t index, Function function) {
  const Result<const Device*> device = DeviceOf(index);
  if (!device.ok()) return device.status();
  return function(**device);
}

Status DeviceCount(int32_t* count) {
  ATTEND_RETURN_IF_ERROR(NotNull("count", count));
  std::string why;
  const Result<int32_t> found = CudaDevices(&why);
  if (!found.ok()) return found.status();
  if (!why.empty()) SetLastError(why);
  *count = *found;
  return Status();
}

Status Malloc(int32_t index, int64_t bytes, void** data) {
  ATTEND_RETURN_IF_ERROR(NotNull("data", data));
  ATTEND_RETURN_IF_ERROR(CheckBytes(bytes));
  *data = nullptr;
  if (bytes == 0) return Status();
  return On(index, [&](const Device& device) {
    const Result<void*> memory = device.Malloc(index, bytes);
    if (!memory.ok()) return memory.status();
    *data = *memory;
    return Status();
  });
}

Status Free(int32_t index, void* data) {
  if (data == nullptr) return Status();
  return On(index, [&](const Device& device) { return device.Free(index, data); });
}

Status Memcpy(int32_t index, void* to, const void* from, int64_t bytes, int32_t kind,
              void* stream) {
  ATTEND_RETURN_IF_ERROR(CheckBytes(bytes));
  ATTEND_RETURN_IF_ERROR(CheckRange("kind", kind, ATTEND_HOST_TO_DEVICE, ATTEND_DEVICE_TO_DEVICE));
  if (bytes == 0) return Status();
  ATTEND_RETURN_IF_ERROR(NotNull("to", to));
  ATTEND_RETURN_IF_ERROR(NotNull("from", from));
  return On(index, [&](const Device& device) {
    return device.Memcpy(index, to, from, bytes, kind, stream);
  });
}

Status Memset(int32_t index, void* data, int32_t value, int64_t bytes, void* stream) {
  ATTEND_RETURN_IF_ERROR(CheckBytes(bytes));
  ATTEND_RETURN_IF_ERROR(CheckRange("value", value, 0, 255));
  if (bytes == 0) return Status();
  ATTEND_RETURN_IF_ERROR(NotNull("data", data));
  return On(index,
            [&](const Device& device) { return device.Memset(index, data, value, bytes, stream); });
}

Status Synchronize(int32_t index, void* stream) {
  return On(index, [&](const Device& device) { return device.Synchronize(index, stream); });
}

}  // namespace
}  // namespace c
}  // namespace attend

int32_t attend_device_count(int32_t* count) {
  return attend::Run([&] { return attend::c::DeviceCount(count); });
}

int32_t attend_malloc(int32_t device, int64_t bytes, void** data) {
  return attend::Run([&] { return attend::c::Malloc(device, bytes, data); });
}

int32_t attend_free(int32_t device, void* data) {
  return attend::Run([&] { return attend::c::Free(device, data); });
}

int32_t attend_memcpy(int32_t device, void* to, const void* from, int64_t bytes, int32_t kind,
                      void* stream) {
  return attend::Run([&] { return attend::c::Memcpy(device, to, from, bytes, kind, stream); });
}

int32_t attend_memset(int32_t device, void* data, int32_t value, int64_t bytes, void* stream) {
  return attend::Run([&] { return attend::c::Memset(device, data, value, bytes, stream); });
}

int32_t attend_synchronize(int32_t device, void* stream) {
  return attend::Run([&] { return attend::c::Synchronize(device, stream); });
}

const char* attend_last_error(void) { return attend::last_error.c_str(); }
