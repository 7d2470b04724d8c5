// SPDX-License-Identifier: Apache-2.0

#include "server/regions/region_registry.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"
#include "server/util/weight_share.h"

namespace attend {
namespace {

// Larger sizes could not even be rounded up to pages.
constexpr uint64_t kRegionBytesMost = uint64_t{1} << 60;

Status TooLarge(uint64_t bytes, const char* bound_name, int64_t bound) {
  return InvalidArgument("a region of " + std::to_string(bytes) + " bytes is above " + bound_name +
                         ", " + std::to_string(bound));
}

Status Full(int64_t bytes, const std::string& why) {
  return ResourceExhausted("a region of " + std::to_string(bytes) + " bytes: " + why);
}

// What is no tenant's counts as the first one's.
int TenantOf(int tenant) { return std::max(0, tenant); }

}  // namespace

RegionRegistry::RegionRegistry(const RegionLimits& limits, RegionMemory& memory, const Clock& clock,
                               TokenSource tokens, const DeviceImporter* importer)
    : limits_(limits),
      memory_(memory),
      clock_(clock),
      tokens_(std::move(tokens)),
      importer_(importer),
      open_bytes_(limits.tenant_weights.size()),
      thread_([this] { Run(); }) {}

RegionRegistry::~RegionRegistry() {
  std::unordered_map<std::string, RegionRef> forgotten;
  {
    const MutexLock lock(mutex_);
    forgotten.swap(regions_);
  }
  forgotten.clear();
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
  assert(taken_bytes_ == 0 && closed_.empty() && "a region outlived its registry");
}

uint64_t RegionRegistry::AddClient(int tenant) {
  const MutexLock lock(mutex_);
  assert(static_cast<size_t>(TenantOf(tenant)) < open_bytes_.size());
  Client& client = clients_[++last_client_];
  client.tenant = tenant;
  client.last_use = ++uses_;
  return last_client_;
}

void RegionRegistry::RemoveClient(uint64_t client) {
  std::vector<RegionRef> forgotten;  // released outside the lock
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;
  while (!found->second.tokens.empty()) {
    forgotten.push_back(ForgetLocked(regions_.find(*found->second.tokens.begin())));
  }
  clients_.erase(found);
}

RegionRef RegionRegistry::ForgetLocked(Regions::iterator region) {
  assert(region != regions_.end());
  RegionRef forgotten = std::move(region->second);
  clients_.at(forgotten->client).tokens.erase(region->first);
  regions_.erase(region);
  CountOpenLocked(*forgotten, -1);
  return forgotten;
}

RegionRegistry::ClientUse RegionRegistry::UseOf(uint64_t client) const {
  const MutexLock lock(mutex_);
  ClientUse use;
  const auto found = clients_.find(client);
  if (found == clients_.end()) return use;
  use.last = found->second.last_use;
  for (const std::string& token : found->second.tokens) {
    const RegionRef& region = regions_.at(token);
    use.in_use |= region.use_count() > 1;
    use.last = std::max(use.last, region->last_use);
  }
  return use;
}

int64_t RegionRegistry::ShareOf(int tenant) const {
  return attend::ShareOf(limits_.tenant_weights, tenant, limits_.bytes_max);
}

Status RegionRegistry::CheckClientLocked(const Client& client, int64_t bytes) const {
  if (client.regions >= limits_.client_regions_max) {
    return ResourceExhausted("the connection has " + std::to_string(client.regions) +
                             " regions, may have at most " +
                             std::to_string(limits_.client_regions_max));
  }
  if (bytes > limits_.client_bytes_max - client.bytes) {
    return Full(bytes, std::to_string(client.bytes) +
                           " of the connection's bound (shared-memory-client-max), " +
                           std::to_string(limits_.client_bytes_max) + ", are in use");
  }
  return Status();
}

Status RegionRegistry::CheckLocked(const Client& client, int64_t bytes) const {
  ATTEND_RETURN_IF_ERROR(CheckClientLocked(client, bytes));
  if (bytes > limits_.bytes_max - taken_bytes_) {
    // How much others use is told by the metrics alone.
    return Full(bytes, "the bound of all regions (shared-memory-max), " +
                           std::to_string(limits_.bytes_max) +
                           ", has too little left; the tenant has " +
                           std::to_string(open_bytes_[TenantOf(client.tenant)]) +
                           ", its share is " + std::to_string(ShareOf(TenantOf(client.tenant))));
  }
  return Status();
}

std::vector<RegionRef> RegionRegistry::DisplaceLocked(const Client& client, int64_t bytes) {
  const int tenant = TenantOf(client.tenant);
  const auto enough = [&]() ATTEND_REQUIRES(mutex_) {
    return bytes <= limits_.bytes_max - stats_.bytes;
  };
  std::vector<RegionRef> displaced;
  if (enough() || bytes > ShareOf(tenant) - open_bytes_[tenant]) return displaced;
  const auto beyond_share = [&](const SharedRegion& region) ATTEND_REQUIRES(mutex_) {
    const int owner = TenantOf(region.tenant);
    return region.device == SharedRegion::kHost && open_bytes_[owner] > ShareOf(owner);
  };
  std::map<std::pair<ClientUse, std::string>, Regions::iterator> candidates;
  for (auto each = regions_.begin(); each != regions_.end(); ++each) {
    if (!beyond_share(*each->second)) continue;
    const ClientUse use{each->second.use_count() > 1, each->second->last_use};
    candidates.emplace(std::pair(use, each->first), each);
  }
  for (const auto& [use, region] : candidates) {
    if (enough()) break;
    if (beyond_share(*region->second)) displaced.push_back(ForgetLocked(region));
  }
  stats_.displaced += std::ssize(displaced);
  return displaced;
}

// Waits while regions that are being closed may make the room that the client lacks.
Status RegionRegistry::Reserve(uint64_t client, int64_t bytes, CountHold& hold) {
  std::optional<TimePoint> displaced_at;
  for (;;) {
    std::vector<RegionRef> displaced;  // let go of outside the lock
    const MutexLock lock(mutex_);
    const auto found = clients_.find(client);
    if (found == clients_.end()) return Internal("the client has gone");
    Client& owner = found->second;
    Status status = CheckLocked(owner, bytes);
    const bool counts = limits_.tenants != nullptr && bytes > 0;
    const int tenant = TenantOf(owner.tenant);
    const bool limit_fits = !counts || limits_.tenants->Fits(tenant, Limit::kSharedMemory, bytes);
    if (limit_fits && CheckClientLocked(owner, bytes).ok()) {
      displaced = DisplaceLocked(owner, bytes);
      if (!displaced.empty()) {
        displaced_at = clock_.Now();
        continue;
      }
    }
    // A client may take again what it has just released. The time counts from the start of the
    // reaping: a device that hangs costs the caller's thread this time once, not once for each
    // region.
    TimePoint until = reaping_ ? reaping_since_ + limits_.return_wait : clock_.Now();
    if (displaced_at) until = std::max(until, *displaced_at + limits_.return_wait);
    if (!(status.ok() && limit_fits) && clock_.Now() < until) {
      clock_.WaitUntil(changed_, mutex_, until);
      continue;
    }
    if (status.ok() && counts) {
      status = limits_.tenants->Take(tenant, Limit::kSharedMemory, hold, bytes);
    }
    if (!status.ok()) return status;
    owner.bytes += bytes;
    ++owner.regions;
    owner.last_use = ++uses_;
    taken_bytes_ += bytes;
    assert(taken_bytes_ <= limits_.bytes_max && owner.bytes <= limits_.client_bytes_max);
    return status;
  }
}

Result<RegionRegistry::Created> RegionRegistry::Create(uint64_t client, uint64_t bytes) {
  Status status;
  const int64_t page_bytes = memory_.page_bytes();
  int64_t rounded = 0;
  if (bytes == 0) {
    status = InvalidArgument("a region of 0 bytes, must have at least 1");
  } else if (bytes > kRegionBytesMost) {
    status = TooLarge(bytes, "shared-memory-max", limits_.bytes_max);
  } else {
    rounded = (static_cast<int64_t>(bytes) + page_bytes - 1) / page_bytes * page_bytes;
    if (rounded > limits_.bytes_max) {
      status = TooLarge(bytes, "shared-memory-max", limits_.bytes_max);
    } else if (rounded > limits_.client_bytes_max) {
      status = TooLarge(bytes, "shared-memory-client-max", limits_.client_bytes_max);
    }
  }
  CountHold counted;
  if (status.ok()) status = Reserve(client, rounded, counted);
  if (!status.ok()) return Refuse(std::move(status));
  // Without the lock, because pages are allocated and locked.
  Result<RegionMapping> mapping = memory_.Map(rounded);
  if (!mapping.ok()) {
    const MutexLock lock(mutex_);
    UncountLocked(client, rounded);
    ++stats_.refused;
    return mapping.status();
  }
  auto made = std::make_unique<SharedRegion>();
  made->data = static_cast<char*>(mapping->data);
  made->bytes = mapping->bytes;
  made->client = client;
  made->counted = std::move(counted);
  Result<std::string> token = Add(std::move(made));
  if (!token.ok()) return token.status();
  return Created{std::move(*token), mapping->bytes, std::move(mapping->file)};
}

Result<std::string> RegionRegistry::Import(uint64_t client, const ImportRequest& request) {
  if (importer_ == nullptr) {
    return Refuse(Unimplemented("the server takes no GPU memory; --cuda-ipc turns that on"));
  }
  CountHold none;
  if (Status status = Reserve(client, 0, none); !status.ok()) return Refuse(std::move(status));
  Result<DeviceImport> memory = importer_->Import(request);
  {
    const MutexLock lock(mutex_);
    if (!memory.ok()) {
      UncountLocked(client, 0);
      ++stats_.refused;
      return memory.status();
    }
    ++stats_.lent_regions;
    stats_.lent_bytes += memory->bytes;
  }
  auto made = std::make_unique<SharedRegion>();
  made->data = memory->data;
  made->bytes = memory->bytes;
  made->client = client;
  made->device = memory->device;
  made->imported = std::move(*memory);
  return Add(std::move(made));
}

Status RegionRegistry::Refuse(Status status) {
  const MutexLock lock(mutex_);
  ++stats_.refused;
  return status;
}

Result<std::string> RegionRegistry::Add(std::unique_ptr<SharedRegion> made) {
  const std::shared_ptr<SharedRegion> region(made.release(),
                                             [this](SharedRegion* last) { Reap(last); });
  Result<std::string> token = tokens_();
  if (token.ok()) region->token = *token;
  const MutexLock lock(mutex_);
  const auto owner = clients_.find(region->client);
  if (token.ok() && owner == clients_.end()) token = Internal("the client has gone");
  if (token.ok()) region->tenant = owner->second.tenant;
  if (token.ok() && !regions_.emplace(*token, region).second) {
    token = Internal("a token came twice");
  }
  if (!token.ok()) {
    ++stats_.refused;
    return token.status();
  }
  owner->second.tokens.insert(*token);
  region->last_use = ++uses_;
  CountOpenLocked(*region, 1);
  ++stats_.created;
  return token;
}

void RegionRegistry::CountOpenLocked(const SharedRegion& region, int sign) {
  if (region.device != SharedRegion::kHost) return;
  stats_.regions += sign;
  stats_.bytes += sign * region.bytes;
  open_bytes_[TenantOf(region.tenant)] += sign * region.bytes;
  assert(0 <= stats_.bytes && stats_.bytes <= taken_bytes_);
}

Status RegionRegistry::Release(uint64_t client, const std::string& token,
                               std::function<void()> closed) {
  {
    RegionRef forgotten;  // released outside the lock
    const MutexLock lock(mutex_);
    const auto owner = clients_.find(client);
    if (owner == clients_.end() || !owner->second.tokens.contains(token)) {
      return Status(Code::kNotFound, "the token names no region of this connection");
    }
    owner->second.last_use = ++uses_;
    forgotten = ForgetLocked(regions_.find(token));
    // The client may free lent memory as soon as it is told. The server owns the memory it made.
    if (forgotten->device != SharedRegion::kHost) {
      if (closed) closed_.emplace(token, std::exchange(closed, {}));
    }
  }
  if (closed) closed();
  return Status();
}

RegionRef RegionRegistry::Find(const std::string& token, int tenant) const {
  const MutexLock lock(mutex_);
  const auto found = regions_.find(token);
  if (found == regions_.end()) return nullptr;
  const int owner = found->second->tenant;
  if (owner != SharedRegion::kAnyTenant && owner != tenant) return nullptr;
  found->second->last_use = ++uses_;
  return found->second;
}

RegionRegistry::Stats RegionRegistry::stats() const {
  const MutexLock lock(mutex_);
  Stats stats = stats_;
  stats.clients = static_cast<int64_t>(clients_.size());
  stats.changing_bytes = taken_bytes_ - stats.bytes;
  return stats;
}

void RegionRegistry::Reap(SharedRegion* region) {
  {
    const MutexLock lock(mutex_);
    region->next = unreaped_;
    unreaped_ = region;
    if (!std::exchange(reaping_, true)) reaping_since_ = clock_.Now();
  }
  changed_.NotifyAll();
}

void RegionRegistry::UncountLocked(uint64_t client, int64_t bytes) {
  taken_bytes_ -= bytes;
  assert(taken_bytes_ >= 0);
  const auto owner = clients_.find(client);
  if (owner == clients_.end()) return;
  owner->second.bytes -= bytes;
  --owner->second.regions;
  assert(owner->second.bytes >= 0 && owner->second.regions >= 0);
}

std::function<void()> RegionRegistry::TakeClosedLocked(const SharedRegion& region) {
  const auto found = closed_.find(region.token);
  if (found == closed_.end()) return {};
  std::function<void()> closed = std::move(found->second);
  closed_.erase(found);
  return closed;
}

void RegionRegistry::Run() {
  NameThread("attend-regions");
  MutexLock lock(mutex_);
  for (;;) {
    while (!stop_ && unreaped_ == nullptr) changed_.Wait(mutex_);
    if (unreaped_ == nullptr) return;
    SharedRegion* const region = std::exchange(unreaped_, unreaped_->next);
    const bool lent = region->device != SharedRegion::kHost;
    reaping_since_ = clock_.Now();
    lock.Unlock();
    if (lent) {
      importer_->Release(std::move(region->imported));
    } else {
      memory_.Unmap(region->data, region->bytes);
    }
    lock.Lock();
    UncountLocked(region->client, lent ? 0 : region->bytes);
    if (lent) {
      --stats_.lent_regions;
      stats_.lent_bytes -= region->bytes;
    }
    const std::function<void()> closed = TakeClosedLocked(*region);
    delete region;
    reaping_ = unreaped_ != nullptr;
    changed_.NotifyAll();
    if (!closed) continue;
    lock.Unlock();
    closed();
    lock.Lock();
  }
}

}  // namespace attend
