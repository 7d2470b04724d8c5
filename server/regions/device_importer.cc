// SPDX-License-Identifier: Apache-2.0

#include "server/regions/device_importer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "server/memory/range_allocator.h"
#include "server/util/random_token.h"

namespace attend {
namespace {

// "GPU-6b1d0c2e-...", as nvidia-smi prints it.
std::string UuidText(const std::string& uuid) {
  std::string text = HexText(uuid);
  for (const size_t at : {20, 16, 12, 8}) text.insert(at, 1, '-');
  return "GPU-" + text;
}

Status CheckLoan(const DeviceLoan& loan) {
  if (loan.device_uuid.size() != kDeviceUuidBytes) {
    return InvalidArgument("device_uuid has " + std::to_string(loan.device_uuid.size()) +
                           " bytes, must have " + std::to_string(kDeviceUuidBytes));
  }
  if (loan.bytes == 0) return InvalidArgument("bytes is 0, must be at least 1");
  if (loan.offset % kTensorAlignBytes != 0) {
    return InvalidArgument("offset is " + std::to_string(loan.offset) + ", must be a multiple of " +
                           std::to_string(kTensorAlignBytes));
  }
  return Status();
}

}  // namespace

bool DeviceImporter::usable() const {
  return std::any_of(backends_.begin(), backends_.end(),
                     [](const Backend* backend) { return !backend->info().uuid.empty(); });
}

Result<ImportedMemory> DeviceImporter::Import(const DeviceLoan& loan) const {
  ATTEND_RETURN_IF_ERROR(CheckLoan(loan));
  std::string known;
  for (size_t i = 0; i < backends_.size(); ++i) {
    const DeviceInfo& info = backends_[i]->info();
    if (info.uuid.empty()) continue;
    if (info.uuid == loan.device_uuid) return Open(static_cast<int>(i), loan);
    known += (known.empty() ? "" : ", ") + info.name + " " + UuidText(info.uuid);
  }
  return Status(Code::kNotFound, "the memory is on " + UuidText(loan.device_uuid) +
                                     ", this server computes on " + known);
}

Result<ImportedMemory> DeviceImporter::Open(int device, const DeviceLoan& loan) const {
  Backend& backend = *backends_[static_cast<size_t>(device)];
  const Result<LentMemory> lent = backend.BorrowMemory(loan.memory_handle);
  if (!lent.ok()) return lent.status();
  ImportedMemory memory;
  memory.device = device;
  memory.device_name = backend.info().name;
  memory.allocation = lent->data;
  Status status;
  const auto size = static_cast<uint64_t>(lent->bytes);
  if (loan.bytes > size || loan.offset > size - loan.bytes) {
    status = InvalidArgument("offset is " + std::to_string(loan.offset) + " and bytes " +
                             std::to_string(loan.bytes) + ", the allocation has " +
                             std::to_string(lent->bytes));
  } else if (!loan.event_handle.empty()) {
    Result<std::unique_ptr<DeviceEvent>> event = backend.BorrowEvent(loan.event_handle);
    status = event.status();
    if (event.ok()) memory.event = std::move(*event);
  }
  if (!status.ok()) {
    Release(std::move(memory));
    return status;
  }
  memory.data = lent->data + static_cast<std::ptrdiff_t>(loan.offset);
  memory.bytes = static_cast<int64_t>(loan.bytes);
  return memory;
}

void DeviceImporter::Release(ImportedMemory memory) const {
  memory.event.reset();
  backends_[static_cast<size_t>(memory.device)]->ReturnMemory(memory.allocation);
}

}  // namespace attend
