// SPDX-License-Identifier: Apache-2.0

#include "server/oip/region_names.h"

#include <algorithm>
#include <utility>

namespace attend::oip {
namespace {

constexpr size_t kNameBytesMax = 256;

RegionNames::Kind KindOf(const NamedRegion& region) {
  return region.file ? RegionNames::Kind::kFile : RegionNames::Kind::kGpu;
}

Status Unknown(const std::string& name) {
  return Status(Code::kNotFound, "Unable to find shared memory region: '" + name + "'");
}

}  // namespace

RegionNames::RegionNames(Options options) : options_(std::move(options)) {
  names_.resize(static_cast<size_t>(options_.tenants));
  for (int i = 0; i < options_.tenants && gpus(); ++i) {
    clients_.push_back(options_.lent->AddClient());
  }
}

RegionNames::~RegionNames() {
  for (const uint64_t client : clients_) options_.lent->RemoveClient(client);
}

Status RegionNames::Reserve(int tenant, const std::string& name, uint64_t bytes) {
  if (name.empty() || name.size() > kNameBytesMax) {
    return InvalidArgument("name has " + std::to_string(name.size()) + " bytes, must have 1 to " +
                           std::to_string(kNameBytesMax));
  }
  if (bytes == 0 || bytes > INT64_MAX) {
    return InvalidArgument("byte_size is " + std::to_string(bytes) +
                           ", must be at least 1 and below 2^63");
  }
  const MutexLock lock(mutex_);
  Names& names = names_[static_cast<size_t>(tenant)];
  if (names.contains(name)) {
    return Status(Code::kAlreadyExists, "shared memory region '" + name + "' already in manager");
  }
  if (std::ssize(names) >= options_.regions_max) {
    return ResourceExhausted("the tenant has " + std::to_string(names.size()) +
                             " regions, may have at most " + std::to_string(options_.regions_max) +
                             " (oip-shared-memory-regions)");
  }
  names.emplace(name, nullptr);
  return Status();
}

void RegionNames::Keep(int tenant, NamedRegionRef region) {
  const MutexLock lock(mutex_);
  names_[static_cast<size_t>(tenant)].at(region->name) = std::move(region);
}

void RegionNames::GiveUp(int tenant, const std::string& name) {
  const MutexLock lock(mutex_);
  names_[static_cast<size_t>(tenant)].erase(name);
}

Status RegionNames::RegisterFile(int tenant, const std::string& name, const std::string& key,
                                 uint64_t offset, uint64_t bytes) {
  if (!files()) {
    return Unimplemented(
        "the server takes no system shared memory; --oip-shared-memory turns "
        "that on");
  }
  ATTEND_RETURN_IF_ERROR(Reserve(tenant, name, bytes));
  Result<SharedFile> file = SharedFile::Open(key, *options_.files);
  Status status = file.status();
  if (status.ok()) {
    const auto size = static_cast<uint64_t>(std::max<int64_t>(0, file->Size()));
    if (bytes > size || offset > size - bytes) {
      status = InvalidArgument("Invalid offset + byte size for shared memory region: '" + name +
                               "': offset is " + std::to_string(offset) + " and byte_size " +
                               std::to_string(bytes) + ", key " + key + " has " +
                               std::to_string(size) + " bytes");
    }
  }
  if (!status.ok()) {
    GiveUp(tenant, name);
    return status;
  }
  auto region = std::make_shared<NamedRegion>();
  region->name = name;
  region->file = std::move(*file);
  region->offset = static_cast<int64_t>(offset);
  region->bytes = static_cast<int64_t>(bytes);
  Keep(tenant, std::move(region));
  return Status();
}

Status RegionNames::RegisterGpu(int tenant, const std::string& name, const std::string& handle,
                                int64_t device_id, uint64_t bytes) {
  if (!gpus()) {
    return Unimplemented(
        "the server takes no memory of GPUs; --oip-cuda-shared-memory turns "
        "that on");
  }
  const auto gpu = std::find_if(options_.gpus.begin(), options_.gpus.end(),
                                [&](const Gpu& each) { return each.id == device_id; });
  if (gpu == options_.gpus.end()) {
    return InvalidArgument("device_id is " + std::to_string(device_id) + ", must be one of the " +
                           std::to_string(options_.gpus.size()) +
                           " GPUs that this server computes on");
  }
  ATTEND_RETURN_IF_ERROR(Reserve(tenant, name, bytes));
  Result<std::string> token = options_.lent->Import(clients_[static_cast<size_t>(tenant)],
                                                    {gpu->uuid, handle, 0, bytes, {}});
  if (!token.ok()) {
    GiveUp(tenant, name);
    return token.status();
  }
  auto region = std::make_shared<NamedRegion>();
  region->name = name;
  region->bytes = static_cast<int64_t>(bytes);
  region->token = std::move(*token);
  region->device_id = device_id;
  Keep(tenant, std::move(region));
  return Status();
}

void RegionNames::Unregister(int tenant, Kind kind, const std::string& name,
                             const std::shared_ptr<void>& closed) {
  std::vector<NamedRegionRef> forgotten;  // closed outside the lock
  {
    const MutexLock lock(mutex_);
    Names& names = names_[static_cast<size_t>(tenant)];
    for (auto each = names.begin(); each != names.end();) {
      const NamedRegionRef& region = each->second;
      const bool meant =
          region != nullptr && KindOf(*region) == kind && (name.empty() || region->name == name);
      if (meant) forgotten.push_back(region);
      each = meant ? names.erase(each) : std::next(each);
    }
  }
  if (kind == Kind::kFile) return;
  for (const NamedRegionRef& region : forgotten) {
    (void)options_.lent->Release(clients_[static_cast<size_t>(tenant)], region->token,
                                 [closed] { (void)closed; });
  }
}

Result<NamedRegionRef> RegionNames::Find(int tenant, const std::string& name) const {
  const MutexLock lock(mutex_);
  const Names& names = names_[static_cast<size_t>(tenant)];
  const auto found = names.find(name);
  if (found == names.end() || found->second == nullptr) return Unknown(name);
  return found->second;
}

Result<std::vector<NamedRegionRef>> RegionNames::List(int tenant, Kind kind,
                                                      const std::string& name) const {
  std::vector<NamedRegionRef> listed;
  const MutexLock lock(mutex_);
  for (const auto& [each, region] : names_[static_cast<size_t>(tenant)]) {
    if (region == nullptr || KindOf(*region) != kind) continue;
    if (name.empty() || each == name) listed.push_back(region);
  }
  if (!name.empty() && listed.empty()) return Unknown(name);
  return listed;
}

}  // namespace attend::oip
