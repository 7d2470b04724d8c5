// SPDX-License-Identifier: Apache-2.0

#include "tests/client/support/fake_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "client/memory/cuda_driver.h"

namespace attend::client::test {
namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kNotReady = 600;

std::mutex allocations_mutex;
std::map<uintptr_t, size_t> allocations;  // bytes by address

std::string HandleOf(const char* kind, uint64_t number) {
  std::string handle = std::string(kind) + " " + std::to_string(number);
  handle.resize(64, '.');
  return handle;
}

struct FakeEvent {
  std::string handle;
};

}  // namespace

FakeCuda& FakeCuda::Get() {
  static FakeCuda driver;
  return driver;
}

void FakeCuda::Enqueue(std::string what, void* stream, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    log_.push_back(std::move(what) + " on " + std::to_string(reinterpret_cast<uintptr_t>(stream)));
    if (held_) {
      waiting_.push_back({stream, std::move(work)});
      return;
    }
  }
  work();
}

void FakeCuda::Hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void FakeCuda::LetGo() {
  std::vector<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    held_ = false;
    waiting.swap(waiting_);
  }
  for (const Waiting& each : waiting) each.work();
}

bool FakeCuda::IsIdle(void* stream) {
  const std::lock_guard lock(mutex_);
  return std::none_of(waiting_.begin(), waiting_.end(),
                      [stream](const Waiting& each) { return each.stream == stream; });
}

std::vector<std::string> FakeCuda::TakeLog() {
  const std::lock_guard lock(mutex_);
  return std::exchange(log_, {});
}

// The names of cuda.h and the types that the client gives them: UndefinedBehaviorSanitizer compares
// those of a function and its call.
extern "C" {

int cuInit(unsigned) { return 0; }

int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : kInvalidDevice;
}

int cuDeviceGetUuid(CudaDriver::Uuid* uuid, int) {
  std::memcpy(uuid->bytes, FakeCuda::Get().uuid.data(), 16);
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &FakeCuda::Get();
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }

int cuCtxPopCurrent_v2(void** context) {
  *context = nullptr;
  return 0;
}

int cuCtxSynchronize() { return 0; }

int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  FakeCuda& driver = FakeCuda::Get();
  if (driver.refuses_allocations()) return kOutOfMemory;
  void* const data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(data, 0xff, bytes);
  *address = reinterpret_cast<uintptr_t>(data);
  driver.CountAllocation();
  const std::lock_guard lock(allocations_mutex);
  allocations[*address] = bytes;
  return 0;
}

int cuMemFree_v2(unsigned long long address) {
  const std::lock_guard lock(allocations_mutex);
  if (allocations.erase(address) == 0) return kInvalidValue;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}

int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return 0;
}

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  FakeCuda::Get().Enqueue("copy " + std::to_string(bytes), stream, [=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
  return 0;
}

int cuStreamSynchronize(void*) {
  FakeCuda::Get().LetGo();
  return 0;
}

int cuStreamQuery(void* stream) { return FakeCuda::Get().IsIdle(stream) ? 0 : kNotReady; }

int cuStreamWaitEvent(void* stream, void*, unsigned) {
  FakeCuda::Get().Enqueue("wait", stream, [] {});
  return 0;
}

int cuMemGetAddressRange_v2(unsigned long long* base, size_t* size, unsigned long long address) {
  const std::lock_guard lock(allocations_mutex);
  const auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return kInvalidValue;
  *base = std::prev(after)->first;
  *size = std::prev(after)->second;
  return 0;
}

int cuPointerGetAttribute(void* ordinal, int, unsigned long long) {
  *static_cast<int*>(ordinal) = 0;
  return 0;
}

int cuIpcGetMemHandle(CudaDriver::IpcHandle* handle, unsigned long long address) {
  size_t bytes = 0;
  {
    const std::lock_guard lock(allocations_mutex);
    bytes = allocations.at(address);
  }
  const std::string made = HandleOf("memory", address);
  std::memcpy(handle->bytes, made.data(), made.size());
  FakeCuda& driver = FakeCuda::Get();
  if (driver.on_memory_handle) {
    driver.on_memory_handle(made, reinterpret_cast<char*>(address), bytes);
  }
  return 0;
}

int cuIpcGetEventHandle(CudaDriver::IpcHandle* handle, void* event) {
  const std::string& made = static_cast<FakeEvent*>(event)->handle;
  std::memcpy(handle->bytes, made.data(), made.size());
  if (FakeCuda::Get().on_event_handle) FakeCuda::Get().on_event_handle(made);
  return 0;
}

int cuEventCreate(void** event, unsigned) {
  auto* const made = new FakeEvent;
  made->handle = HandleOf("event", reinterpret_cast<uintptr_t>(made));
  *event = made;
  return 0;
}

int cuEventRecord(void* event, void* stream) {
  FakeCuda& driver = FakeCuda::Get();
  const std::string handle = static_cast<FakeEvent*>(event)->handle;
  if (driver.on_record) driver.on_record(handle);
  driver.Enqueue("record", stream, [&driver, handle] {
    if (driver.on_reached) driver.on_reached(handle);
  });
  return 0;
}

int cuEventDestroy_v2(void* event) {
  delete static_cast<FakeEvent*>(event);
  return 0;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}

}  // extern "C"

}  // namespace attend::client::test
