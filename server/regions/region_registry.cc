// SPDX-License-Identifier: Apache-2.0

#include "server/regions/region_registry.h"

#include <algorithm>
#include <cassert>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"

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

}  // namespace

RegionRegistry::RegionRegistry(const RegionLimits& limits, RegionMemory& memory, const Clock& clock,
                               TokenSource tokens, const DeviceImporter* importer)
    : limits_(limits),
      memory_(memory),
      clock_(clock),
      tokens_(std::move(tokens)),
      importer_(importer),
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
  clients_[++last_client_].tenant = tenant;
  return last_client_;
}

void RegionRegistry::RemoveClient(uint64_t client) {
  std::vector<RegionRef> forgotten;  // released outside the lock
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;
  for (const std::string& token : found->second.tokens) {
    const auto region = regions_.find(token);
    assert(region != regions_.end());
    CountOpenLocked(*region->second, -1);
    forgotten.push_back(std::move(region->second));
    regions_.erase(region);
  }
  clients_.erase(found);
}

Status RegionRegistry::CheckLocked(const Client& client, int64_t bytes) const {
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
  if (bytes > limits_.bytes_max - taken_bytes_) {
    // How much others use is told by the metrics alone.
    return Full(bytes, "the bound of all regions (shared-memory-max), " +
                           std::to_string(limits_.bytes_max) + ", has too little left");
  }
  return Status();
}

Status RegionRegistry::WaitForRoomLocked(uint64_t client, int64_t bytes, CountHold& hold) {
  for (;;) {
    const auto found = clients_.find(client);
    if (found == clients_.end()) return Internal("the client has gone");
    Status status = CheckLocked(found->second, bytes);
    const bool counts = limits_.tenants != nullptr && bytes > 0;
    const int tenant = std::max(0, found->second.tenant);
    // A client may take again what it has just released. The time counts from the start of the
    // reaping: a device that hangs costs the caller's thread this time once, not once for each
    // region.
    const bool fits =
        status.ok() && (!counts || limits_.tenants->Fits(tenant, Limit::kSharedMemory, bytes));
    if (fits || !reaping_ || clock_.Now() - reaping_since_ >= limits_.return_wait) {
      if (!status.ok() || !counts) return status;
      return limits_.tenants->Take(tenant, Limit::kSharedMemory, hold, bytes);
    }
    clock_.WaitUntil(changed_, mutex_, reaping_since_ + limits_.return_wait);
  }
}

Status RegionRegistry::Reserve(uint64_t client, int64_t bytes, CountHold& hold) {
  const MutexLock lock(mutex_);
  ATTEND_RETURN_IF_ERROR(WaitForRoomLocked(client, bytes, hold));
  const auto found = clients_.find(client);
  found->second.bytes += bytes;
  ++found->second.regions;
  taken_bytes_ += bytes;
  assert(taken_bytes_ <= limits_.bytes_max && found->second.bytes <= limits_.client_bytes_max);
  return Status();
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
  CountOpenLocked(*region, 1);
  ++stats_.created;
  return token;
}

void RegionRegistry::CountOpenLocked(const SharedRegion& region, int sign) {
  if (region.device != SharedRegion::kHost) return;
  stats_.regions += sign;
  stats_.bytes += sign * region.bytes;
  assert(0 <= stats_.bytes && stats_.bytes <= taken_bytes_);
}

Status RegionRegistry::Release(uint64_t client, const std::string& token,
                               std::function<void()> closed) {
  {
    RegionRef forgotten;  // released outside the lock
    const MutexLock lock(mutex_);
    const auto owner = clients_.find(client);
    if (owner == clients_.end() || owner->second.tokens.erase(token) == 0) {
      return Status(Code::kNotFound, "the token names no region of this connection");
    }
    const auto found = regions_.find(token);
    assert(found != regions_.end());
    forgotten = std::move(found->second);
    regions_.erase(found);
    CountOpenLocked(*forgotten, -1);
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
  return owner == SharedRegion::kAnyTenant || owner == tenant ? found->second : nullptr;
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
