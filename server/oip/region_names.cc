// SPDX-License-Identifier: Apache-2.0
//
// Opening a file or importing GPU memory may block, so it is done without the lock: a Reservation
// first takes the name and the bytes, then Keep fills in the region, or the destructor frees both
// again. A reserved name counts towards the bounds but cannot be found or unregistered yet.

#include "server/oip/region_names.h"

#include <algorithm>
#include <utility>

#include "server/util/rejection.h"

namespace attend::oip {
namespace {

constexpr size_t kNameBytesMax = 256;

RegionNames::Kind KindOf(const NamedRegion& region) {
  return region.file ? RegionNames::Kind::kFile : RegionNames::Kind::kGpu;
}

Status Unknown(const std::string& name) {
  return Status(Code::kNotFound, "Unable to find shared memory region: '" + name + "'");
}

// File rules by tenant. Tenant names contain no colon, so no tenant's prefix is a prefix of
// another's.
std::vector<SharedFile::Rules> RulesOf(const RegionNames::Options& options) {
  if (!options.files) return {};
  std::vector<SharedFile::Rules> rules(options.tenants.size(), *options.files);
  for (size_t i = 0; i < rules.size() && rules.size() > 1; ++i) {
    rules[i].prefix += options.tenants[i] + ":";
  }
  return rules;
}

}  // namespace

// Reserves a name during registration; frees it unless Keep was called.
class RegionNames::Reservation {
 public:
  Reservation(RegionNames& all, int tenant, Kind kind)
      : all_(all), tenant_(static_cast<size_t>(tenant)), kind_(kind) {}
  ~Reservation() {
    if (!held_) return;
    const MutexLock lock(all_.mutex_);
    Tenant& tenant = all_.tenants_[tenant_];
    tenant.files_bytes -= files_bytes_;
    tenant.names.erase(at_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  Status Take(const std::string& name, uint64_t bytes) {
    const MutexLock lock(all_.mutex_);
    Tenant& tenant = all_.tenants_[tenant_];
    ATTEND_RETURN_IF_ERROR(all_.CheckRoom(tenant, kind_, name, bytes));
    at_ = tenant.names.emplace(name, nullptr).first;
    if (kind_ == Kind::kFile) files_bytes_ = static_cast<int64_t>(bytes);
    tenant.files_bytes += files_bytes_;
    held_ = true;
    return Status();
  }
  void Keep(NamedRegionRef region) {
    const MutexLock lock(all_.mutex_);
    at_->second = std::move(region);
    held_ = false;
  }

 private:
  RegionNames& all_;
  const size_t tenant_;
  const Kind kind_;
  bool held_ = false;
  Names::iterator at_;
  int64_t files_bytes_ = 0;
};

RegionNames::RegionNames(Options options)
    : options_(std::move(options)), rules_(RulesOf(options_)), tenants_(options_.tenants.size()) {
  for (size_t i = 0; i < options_.tenants.size() && gpus(); ++i) {
    clients_.push_back(options_.lent->AddClient(static_cast<int>(i)));
  }
}

RegionNames::~RegionNames() {
  for (const uint64_t client : clients_) options_.lent->RemoveClient(client);
}

Status RegionNames::CheckRoom(const Tenant& tenant, Kind kind, const std::string& name,
                              uint64_t bytes) const {
  if (name.empty() || name.size() > kNameBytesMax) {
    return InvalidArgument("name has " + std::to_string(name.size()) + " bytes, must have 1 to " +
                           std::to_string(kNameBytesMax));
  }
  if (bytes == 0 || bytes > INT64_MAX) {
    return InvalidArgument("byte_size is " + std::to_string(bytes) +
                           ", must be at least 1 and below 2^63");
  }
  if (tenant.names.contains(name)) {
    return Status(Code::kAlreadyExists, "shared memory region '" + name + "' already in manager");
  }
  if (std::ssize(tenant.names) >= options_.regions_max) {
    return ResourceExhausted(
        Rejection::kRegions,
        "the tenant has " + std::to_string(tenant.names.size()) + " regions, may have at most " +
            std::to_string(options_.regions_max) + " (oip-shared-memory-regions)");
  }
  if (kind != Kind::kFile ||
      static_cast<int64_t>(bytes) <= options_.files_bytes_max - tenant.files_bytes) {
    return Status();
  }
  return ResourceExhausted(
      Rejection::kRegions,
      "byte_size is " + std::to_string(bytes) +
          " and the tenant's other system shared memory regions have " +
          std::to_string(tenant.files_bytes) + " bytes, together they may have at most " +
          std::to_string(options_.files_bytes_max) + " (oip-shared-memory-bytes)");
}

Status RegionNames::RegisterFile(int tenant, const std::string& name, const std::string& key,
                                 uint64_t offset, uint64_t bytes) {
  if (!files()) {
    return Unimplemented(
        "system shared memory is off on this server; --oip-shared-memory turns it on");
  }
  Reservation reserved(*this, tenant, Kind::kFile);
  ATTEND_RETURN_IF_ERROR(reserved.Take(name, bytes));
  Result<SharedFile> file = SharedFile::Open(key, rules_[static_cast<size_t>(tenant)]);
  if (!file.ok()) return file.status();
  const auto size = static_cast<uint64_t>(std::max<int64_t>(0, file->Size()));
  if (bytes > size || offset > size - bytes) {
    return InvalidArgument("Invalid offset + byte size for shared memory region: '" + name +
                           "': offset is " + std::to_string(offset) + " and byte_size " +
                           std::to_string(bytes) + ", key " + key + " has " + std::to_string(size) +
                           " bytes");
  }
  auto region = std::make_shared<NamedRegion>();
  region->name = name;
  region->file = std::move(*file);
  region->offset = static_cast<int64_t>(offset);
  region->bytes = static_cast<int64_t>(bytes);
  reserved.Keep(std::move(region));
  return Status();
}

Status RegionNames::RegisterGpu(int tenant, const std::string& name, const std::string& handle,
                                int64_t device_id, uint64_t bytes) {
  if (!gpus()) {
    return Unimplemented(
        "CUDA shared memory is off on this server; --oip-cuda-shared-memory turns it on");
  }
  const auto gpu = std::find_if(options_.gpus.begin(), options_.gpus.end(),
                                [&](const Gpu& each) { return each.id == device_id; });
  if (gpu == options_.gpus.end()) {
    return InvalidArgument("device_id is " + std::to_string(device_id) + ", must be one of the " +
                           std::to_string(options_.gpus.size()) +
                           " GPUs that this server computes on");
  }
  Reservation reserved(*this, tenant, Kind::kGpu);
  ATTEND_RETURN_IF_ERROR(reserved.Take(name, bytes));
  auto region = std::make_shared<NamedRegion>();
  region->name = name;
  region->bytes = static_cast<int64_t>(bytes);
  region->device_id = device_id;
  // Last, so that no later allocation can fail and leak the imported memory.
  Result<std::string> token = options_.lent->Import(clients_[static_cast<size_t>(tenant)],
                                                    {gpu->uuid, handle, 0, bytes, {}});
  if (!token.ok()) return token.status();
  region->token = std::move(*token);
  reserved.Keep(std::move(region));
  return Status();
}

void RegionNames::Unregister(int tenant, Kind kind, const std::string& name,
                             const std::shared_ptr<void>& closed) {
  std::vector<NamedRegionRef> forgotten;  // closed outside the lock
  {
    const MutexLock lock(mutex_);
    Tenant& of = tenants_[static_cast<size_t>(tenant)];
    Names& names = of.names;
    forgotten.reserve(names.size());  // so that push_back cannot throw half way
    for (auto each = names.begin(); each != names.end();) {
      const NamedRegionRef& region = each->second;
      const bool meant =
          region != nullptr && KindOf(*region) == kind && (name.empty() || region->name == name);
      if (meant) forgotten.push_back(region);
      if (meant && kind == Kind::kFile) of.files_bytes -= region->bytes;
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
  const Names& names = tenants_[static_cast<size_t>(tenant)].names;
  const auto found = names.find(name);
  if (found == names.end() || found->second == nullptr) return Unknown(name);
  return found->second;
}

Result<std::vector<NamedRegionRef>> RegionNames::List(int tenant, Kind kind,
                                                      const std::string& name) const {
  std::vector<NamedRegionRef> listed;
  const MutexLock lock(mutex_);
  for (const auto& [each, region] : tenants_[static_cast<size_t>(tenant)].names) {
    if (region == nullptr || KindOf(*region) != kind) continue;
    if (name.empty() || each == name) listed.push_back(region);
  }
  if (!name.empty() && listed.empty()) return Unknown(name);
  return listed;
}

}  // namespace attend::oip
