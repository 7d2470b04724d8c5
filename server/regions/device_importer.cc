// SPDX-License-Identifier: Apache-2.0

#include "server/regions/device_importer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "server/memory/range_allocator.h"
#include "server/util/random_token.h"

namespace attend {
namespace {

// As nvidia-smi prints it: "GPU-6b1d0c2e-...".
std::string UuidText(const std::string& uuid) {
  std::string text = HexText(uuid);
  for (const size_t at : {20, 16, 12, 8}) text.insert(at, 1, '-');
  return "GPU-" + text;
}

Status CheckRequest(const ImportRequest& request) {
  if (request.device_uuid.size() != kDeviceUuidBytes) {
    return InvalidArgument("device_uuid has " + std::to_string(request.device_uuid.size()) +
                           " bytes, must have " + std::to_string(kDeviceUuidBytes));
  }
  if (request.bytes == 0) return InvalidArgument("bytes is 0, must be at least 1");
  if (request.offset % kTensorAlignBytes != 0) {
    return InvalidArgument("offset is " + std::to_string(request.offset) +
                           ", must be a multiple of " + std::to_string(kTensorAlignBytes));
  }
  return Status();
}

}  // namespace

bool DeviceImporter::usable() const {
  return std::any_of(backends_.begin(), backends_.end(),
                     [](const Backend* backend) { return !backend->info().uuid.empty(); });
}

Result<DeviceImport> DeviceImporter::Import(const ImportRequest& request) const {
  ATTEND_RETURN_IF_ERROR(CheckRequest(request));
  std::string known;
  for (size_t i = 0; i < backends_.size(); ++i) {
    const DeviceInfo& info = backends_[i]->info();
    if (info.uuid.empty()) continue;
    if (info.uuid == request.device_uuid) return Open(static_cast<int>(i), request);
    known += (known.empty() ? "" : ", ") + info.name + " " + UuidText(info.uuid);
  }
  return Status(Code::kNotFound, "the memory is on " + UuidText(request.device_uuid) +
                                     ", this server computes on " + known);
}

Result<DeviceImport> DeviceImporter::Open(int device, const ImportRequest& request) const {
  Backend& backend = *backends_[static_cast<size_t>(device)];
  const Result<ImportedMemory> opened = backend.ImportMemory(request.memory_handle);
  if (!opened.ok()) return opened.status();
  DeviceImport memory;
  memory.device = device;
  memory.device_name = backend.info().name;
  memory.allocation = opened->data;
  Status status;
  const auto size = static_cast<uint64_t>(opened->bytes);
  if (request.bytes > size || request.offset > size - request.bytes) {
    status = InvalidArgument("offset is " + std::to_string(request.offset) + " and bytes is " +
                             std::to_string(request.bytes) + ", must end within the allocation's " +
                             std::to_string(opened->bytes));
  } else if (!request.event_handle.empty()) {
    Result<std::unique_ptr<DeviceEvent>> event = backend.ImportEvent(request.event_handle);
    status = event.status();
    if (event.ok()) memory.event = std::move(*event);
  }
  if (!status.ok()) {
    Release(std::move(memory));
    return status;
  }
  memory.data = opened->data + static_cast<std::ptrdiff_t>(request.offset);
  memory.bytes = static_cast<int64_t>(request.bytes);
  return memory;
}

void DeviceImporter::Release(DeviceImport memory) const {
  memory.event.reset();
  backends_[static_cast<size_t>(memory.device)]->ReleaseMemory(memory.allocation);
}

}  // namespace attend
