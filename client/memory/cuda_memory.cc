// SPDX-License-Identifier: Apache-2.0

#include "client/memory/cuda_memory.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "attend/v1/shared_memory.pb.h"

namespace attend::client {
namespace {

constexpr int64_t kAlignBytes = 256;
// cuda.h's handles for the default streams, besides null.
constexpr uintptr_t kDefaultStreamsMax = 2;  // CU_STREAM_LEGACY, CU_STREAM_PER_THREAD

// Makes a context current on this thread for the object's lifetime.
class Current {
 public:
  Current(const CudaDriver& driver, CudaDriver::Context context)
      : driver_(driver), status_(driver.Check(driver.push_current(context), "cuCtxPushCurrent")) {}
  ~Current() {
    CudaDriver::Context popped;
    if (status_.ok()) (void)driver_.pop_current(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const Status& status() const { return status_; }

 private:
  const CudaDriver& driver_;
  const Status status_;
};

// Retains a GPU's primary context and makes it current for the object's lifetime.
class Primary {
 public:
  Primary(const CudaDriver& driver, CudaDriver::Device device) : driver_(driver), device_(device) {
    status_ = driver.Check(driver.primary_retain(&context_, device), "cuDevicePrimaryCtxRetain");
    if (status_.ok()) status_ = current_.emplace(driver, context_).status();
  }
  ~Primary() {
    current_.reset();
    if (context_ != nullptr) (void)driver_.primary_release(device_);
  }
  Primary(const Primary&) = delete;
  Primary& operator=(const Primary&) = delete;
  const Status& status() const { return status_; }

 private:
  const CudaDriver& driver_;
  const CudaDriver::Device device_;
  CudaDriver::Context context_ = nullptr;
  std::optional<Current> current_;
  Status status_;
};

Result<CudaDriver::Device> DeviceAt(const CudaDriver& driver, int ordinal) {
  int count = 0;
  ATTEND_RETURN_IF_ERROR(driver.Check(driver.device_get_count(&count), "cuDeviceGetCount"));
  if (ordinal < 0 || ordinal >= count) {
    return InvalidArgument("GPU " + std::to_string(ordinal) + ": this process sees " +
                           std::to_string(count) + " of them");
  }
  CudaDriver::Device device = 0;
  ATTEND_RETURN_IF_ERROR(driver.Check(driver.device_get(&device, ordinal), "cuDeviceGet"));
  return device;
}

Result<std::string> UuidOf(const CudaDriver& driver, CudaDriver::Device device) {
  CudaDriver::Uuid uuid;
  ATTEND_RETURN_IF_ERROR(driver.Check(driver.device_get_uuid(&uuid, device), "cuDeviceGetUuid"));
  return std::string(uuid.bytes, sizeof(uuid.bytes));
}

// The device with this UUID, or -1.
CudaDriver::Device FindDevice(const CudaDriver& driver, const std::string& uuid) {
  int count = 0;
  if (driver.device_get_count(&count) != 0) return -1;
  for (int i = 0; i < count; ++i) {
    CudaDriver::Device device = 0;
    if (driver.device_get(&device, i) != 0) continue;
    const Result<std::string> found = UuidOf(driver, device);
    if (found.ok() && *found == uuid) return device;
  }
  return -1;
}

}  // namespace

Result<std::shared_ptr<CudaMemory>> CudaMemory::On(const CudaDriver& driver,
                                                   CudaDriver::Device device) {
  std::shared_ptr<CudaMemory> memory(new CudaMemory(driver, device));
  ATTEND_RETURN_IF_ERROR(
      driver.Check(driver.primary_retain(&memory->context_, device), "cuDevicePrimaryCtxRetain"));
  return memory;
}

Result<std::shared_ptr<CudaMemory>> CudaMemory::Allocate(const std::vector<std::string>& uuids,
                                                         int64_t bytes) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  if (bytes < 1) {
    return InvalidArgument("memory of " + std::to_string(bytes) + " bytes, must have at least 1");
  }
  for (const std::string& uuid : uuids) {
    const CudaDriver::Device device = FindDevice(**driver, uuid);
    if (device < 0) continue;
    Result<std::shared_ptr<CudaMemory>> memory = On(**driver, device);
    if (!memory.ok()) return memory.status();
    ATTEND_RETURN_IF_ERROR((*memory)->Reserve(bytes));
    return memory;
  }
  return Status(Code::kNotFound,
                "this process sees none of the server's " + std::to_string(uuids.size()) + " GPUs");
}

Status CudaMemory::Reserve(int64_t bytes) {
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  ATTEND_RETURN_IF_ERROR(driver_.Check(driver_.mem_alloc(&data_, static_cast<size_t>(bytes)),
                                       std::to_string(bytes) + " bytes of a GPU's memory"));
  owned_ = true;
  bytes_ = bytes;
  return Status();
}

Result<std::shared_ptr<CudaMemory>> CudaMemory::AllocateOn(int ordinal, int64_t bytes) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const Result<CudaDriver::Device> device = DeviceAt(**driver, ordinal);
  if (!device.ok()) return device.status();
  Result<std::shared_ptr<CudaMemory>> memory = On(**driver, *device);
  if (!memory.ok()) return memory.status();
  ATTEND_RETURN_IF_ERROR((*memory)->Reserve(bytes));
  const Current current(**driver, (*memory)->context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  ATTEND_RETURN_IF_ERROR((*memory)->MakeEvent());
  return memory;
}

Result<std::shared_ptr<CudaMemory>> CudaMemory::Wrap(void* data, int64_t bytes) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const auto pointer = reinterpret_cast<CudaDriver::Pointer>(data);
  int ordinal = 0;
  CudaDriver::Device device = 0;
  ATTEND_RETURN_IF_ERROR(
      (*driver)->Check((*driver)->pointer_attribute(&ordinal, CudaDriver::kPointerDevice, pointer),
                       "asking for the GPU of the memory"));
  ATTEND_RETURN_IF_ERROR((*driver)->Check((*driver)->device_get(&device, ordinal), "cuDeviceGet"));
  Result<std::shared_ptr<CudaMemory>> memory = On(**driver, device);
  if (!memory.ok()) return memory.status();
  (*memory)->data_ = pointer;
  (*memory)->bytes_ = bytes;
  v1::ImportCudaMemory lent;
  ATTEND_RETURN_IF_ERROR((*memory)->Describe(&lent));  // fails now for memory that cannot be lent
  return memory;
}

Result<std::shared_ptr<DeviceMemory>> LendableMemory(const std::vector<std::string>& uuids,
                                                     int64_t bytes) {
  Result<std::shared_ptr<CudaMemory>> memory = CudaMemory::Allocate(uuids, bytes);
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<DeviceMemory>(std::move(*memory));
}

CudaMemory::~CudaMemory() {
  if (context_ == nullptr) return;
  {
    const Current current(driver_, context_);
    if (event_ != nullptr) (void)driver_.event_destroy(event_);
    if (owned_) (void)driver_.mem_free(data_);
  }
  (void)driver_.primary_release(device_);
}

Status CudaMemory::MakeEvent() {
  return driver_.Check(driver_.event_create(&event_, CudaDriver::kEventIpc),
                       "making an event that can be shared");
}

Status CudaMemory::Record(void* stream) {
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  if (event_ == nullptr) ATTEND_RETURN_IF_ERROR(MakeEvent());
  return driver_.Check(driver_.event_record(event_, stream), "recording an event");
}

Status CudaMemory::Await(void* stream) {
  if (event_ == nullptr) return Status();
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  return driver_.Check(driver_.stream_wait_event(stream, event_, 0), "waiting for an event");
}

Status CudaMemory::Join(void* stream) {
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  // Recording makes the GPU switch to this process's context, which costs more than the copies that
  // lending saves, so an idle stream is skipped. A default stream also stands for other streams, so
  // querying it proves nothing.
  const bool may_be_idle = reinterpret_cast<uintptr_t>(stream) > kDefaultStreamsMax;
  if (may_be_idle && driver_.stream_query(stream) == 0) return Status();
  const MutexLock lock(join_mutex_);
  ATTEND_RETURN_IF_ERROR(
      driver_.Check(driver_.stream_wait_event(stream, event_, 0), "waiting for an event"));
  return driver_.Check(driver_.event_record(event_, stream), "recording an event");
}

Status CudaMemory::CheckRange(int64_t offset, int64_t bytes) const {
  if (offset >= 0 && bytes >= 0 && offset <= bytes_ && bytes <= bytes_ - offset) return Status();
  return InvalidArgument(std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                         ", the memory has " + std::to_string(bytes_));
}

Status CudaMemory::Write(int64_t offset, const void* from, int64_t bytes) {
  ATTEND_RETURN_IF_ERROR(CheckRange(offset, bytes));
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  ATTEND_RETURN_IF_ERROR(
      driver_.Check(driver_.copy_to_device(data_ + static_cast<CudaDriver::Pointer>(offset), from,
                                           static_cast<size_t>(bytes)),
                    "copying to a GPU"));
  // The copy may still be running when the driver returns.
  return driver_.Check(driver_.synchronize(), "copying to a GPU");
}

Status CudaMemory::Read(int64_t offset, void* to, int64_t bytes) {
  ATTEND_RETURN_IF_ERROR(CheckRange(offset, bytes));
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  return driver_.Check(driver_.copy_to_host(to, data_ + static_cast<CudaDriver::Pointer>(offset),
                                            static_cast<size_t>(bytes)),
                       "copying from a GPU");
}

Status CudaMemory::Describe(v1::ImportCudaMemory* lent) const {
  const Current current(driver_, context_);
  ATTEND_RETURN_IF_ERROR(current.status());
  CudaDriver::Pointer base = 0;
  size_t size = 0;
  ATTEND_RETURN_IF_ERROR(driver_.Check(driver_.address_range(&base, &size, data_),
                                       "asking for the allocation of the memory"));
  const auto offset = static_cast<int64_t>(data_ - base);
  if (bytes_ < 1 || bytes_ > static_cast<int64_t>(size) - offset || offset % kAlignBytes != 0) {
    return InvalidArgument("memory of " + std::to_string(bytes_) + " bytes at " +
                           std::to_string(offset) + " of an allocation of " + std::to_string(size) +
                           ": must be within it, at a multiple of " + std::to_string(kAlignBytes));
  }
  CudaDriver::IpcHandle handle;
  const Status shared = driver_.Check(driver_.ipc_mem_handle(&handle, base), "cuIpcGetMemHandle");
  if (!shared.ok()) {
    return InvalidArgument(shared.message() +
                           ": CUDA shares only memory from cudaMalloc and cuMemAlloc, not from "
                           "stream-ordered pools (cudaMallocAsync) or cuMemCreate");
  }
  Result<std::string> uuid = UuidOf(driver_, device_);
  if (!uuid.ok()) return uuid.status();
  lent->set_device_uuid(std::move(*uuid));
  lent->set_memory_handle(handle.bytes, sizeof(handle.bytes));
  lent->set_offset(static_cast<uint64_t>(offset));
  lent->set_bytes(static_cast<uint64_t>(bytes_));
  if (event_ == nullptr) return Status();
  ATTEND_RETURN_IF_ERROR(
      driver_.Check(driver_.ipc_event_handle(&handle, event_), "cuIpcGetEventHandle"));
  lent->set_event_handle(handle.bytes, sizeof(handle.bytes));
  return Status();
}

Result<std::string> CudaUuid(int ordinal) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const Result<CudaDriver::Device> device = DeviceAt(**driver, ordinal);
  if (!device.ok()) return device.status();
  return UuidOf(**driver, *device);
}

Status CudaCopy(int ordinal, void* to, const void* from, int64_t bytes, void* stream) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  if (bytes == 0) return Status();
  const Result<CudaDriver::Device> device = DeviceAt(**driver, ordinal);
  if (!device.ok()) return device.status();
  const Primary primary(**driver, *device);
  ATTEND_RETURN_IF_ERROR(primary.status());
  const auto result = (*driver)->copy_async(reinterpret_cast<CudaDriver::Pointer>(to),
                                            reinterpret_cast<CudaDriver::Pointer>(from),
                                            static_cast<size_t>(bytes), stream);
  return (*driver)->Check(result, "copying on a GPU's stream");
}

Status CudaSynchronize(int ordinal, void* stream) {
  const Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const Result<CudaDriver::Device> device = DeviceAt(**driver, ordinal);
  if (!device.ok()) return device.status();
  const Primary primary(**driver, *device);
  ATTEND_RETURN_IF_ERROR(primary.status());
  return (*driver)->Check((*driver)->stream_synchronize(stream), "waiting for a GPU's stream");
}

}  // namespace attend::client
