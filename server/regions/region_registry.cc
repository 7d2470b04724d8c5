// SPDX-License-Identifier: Apache-2.0
//
// A region's shared_ptr has a deleter that queues it for the registry's thread, so the last user,
// on any thread, never waits for a device. Bytes are reserved before the memory is allocated,
// without holding the lock in between, and released only after it was closed, so the ledger never
// counts less than is mapped.

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
  return InvalidArgument("a region of " + std::to_string(bytes) + " bytes exceeds " + bound_name +
                         ", " + std::to_string(bound));
}

}  // namespace

RegionRegistry::RegionRegistry(const RegionLimits& limits, RegionMemory& memory, const Clock& clock,
                               TokenSource tokens, const DeviceImporter* importer)
    : limits_(limits),
      memory_(memory),
      clock_(clock),
      tokens_(std::move(tokens)),
      importer_(importer),
      ledger_(limits.bytes_max, limits.tenant_weights),
      thread_([this] { Run(); }) {}

RegionRegistry::~RegionRegistry() {
  std::vector<RegionRef> forgotten;
  {
    const MutexLock lock(mutex_);
    while (!regions_.empty()) forgotten.push_back(ForgetLocked(regions_.begin(), Pages::kKept));
  }
  forgotten.clear();
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.NotifyOne();
  thread_.join();
  assert(ledger_.held() == 0 && closed_.empty() && "a region outlived its registry");
}

uint64_t RegionRegistry::AddClient(int tenant) {
  const MutexLock lock(mutex_);
  assert(TenantOf(tenant) < ledger_.tenants());
  clients_[++last_client_].tenant = tenant;
  return last_client_;
}

void RegionRegistry::RemoveClient(uint64_t client, Pages pages) {
  std::vector<RegionRef> forgotten;  // released outside the lock
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;
  while (!found->second.tokens.empty()) {
    forgotten.push_back(ForgetLocked(regions_.find(*found->second.tokens.begin()), pages));
  }
  clients_.erase(found);
}

bool RegionRegistry::EndClient(uint64_t client) {
  std::vector<RegionRef> forgotten;  // released outside the lock
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  if (found == clients_.end()) return false;
  found->second.ended = true;
  for (const std::string& token : std::set(found->second.tokens)) {
    const auto region = regions_.find(token);
    if (region->second->device == SharedRegion::kHost) continue;
    forgotten.push_back(ForgetLocked(region, Pages::kFreed));
  }
  return !found->second.tokens.empty();
}

bool RegionRegistry::Lends(uint64_t client) const {
  const MutexLock lock(mutex_);
  const auto found = clients_.find(client);
  return found != clients_.end() && found->second.lent > 0;
}

std::shared_ptr<SharedRegion> RegionRegistry::ForgetLocked(Regions::iterator region, Pages pages) {
  assert(region != regions_.end());
  std::shared_ptr<SharedRegion> forgotten = std::move(region->second);
  clients_.at(forgotten->client).tokens.erase(region->first);
  regions_.erase(region);
  CountOpenLocked(*forgotten, -1);
  forgotten->pages = pages;
  return forgotten;
}

Result<RegionRegistry::Created> RegionRegistry::Create(uint64_t client, uint64_t bytes,
                                                       TimePoint* until) {
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
  TenantHold hold;
  if (status.ok()) status = Reserve(client, rounded, hold, until);
  if (!status.ok()) return Refuse(std::move(status), until);
  // Without the lock, because pages are allocated and locked.
  Result<RegionMapping> mapping = memory_.Map(rounded);
  if (!mapping.ok()) {
    const MutexLock lock(mutex_);
    UncountLocked(client, hold.tenant, rounded);
    ++stats_.refused;
    return mapping.status();
  }
  auto made = std::make_unique<SharedRegion>();
  made->data = static_cast<char*>(mapping->data);
  made->bytes = mapping->bytes;
  made->client = client;
  made->tenant = hold.tenant;
  made->counted = std::move(hold.bytes);
  Result<std::string> token = Add(std::move(made));
  if (!token.ok()) return token.status();
  return Created{std::move(*token), mapping->bytes, std::move(mapping->file)};
}

Result<std::string> RegionRegistry::Import(uint64_t client, const ImportRequest& request,
                                           TimePoint* until) {
  if (importer_ == nullptr) {
    return Refuse(Unimplemented("CUDA IPC is off on this server; --cuda-ipc turns it on"));
  }
  TenantHold none;
  if (Status status = Reserve(client, 0, none, until); !status.ok()) {
    return Refuse(std::move(status), until);
  }
  Result<DeviceImport> memory = importer_->Import(request);
  {
    const MutexLock lock(mutex_);
    if (!memory.ok()) {
      UncountLocked(client, none.tenant, 0);
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
  made->tenant = none.tenant;
  made->device = memory->device;
  made->imported = std::move(*memory);
  return Add(std::move(made));
}

Status RegionRegistry::Refuse(Status status, const TimePoint* until) {
  if (until != nullptr && *until != TimePoint()) return status;
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
  if (token.ok() && owner == clients_.end()) token = Internal("the client has disconnected");
  if (token.ok() && !regions_.emplace(*token, region).second) {
    token = Internal("the new token is already in use");
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
  assert(0 <= stats_.bytes && stats_.bytes <= ledger_.held());
}

Status RegionRegistry::Release(uint64_t client, const std::string& token,
                               std::function<void()> closed) {
  {
    RegionRef forgotten;  // released outside the lock
    const MutexLock lock(mutex_);
    const auto owner = clients_.find(client);
    const bool found = owner != clients_.end();
    if (found && owner->second.tokens.contains(token)) {
      forgotten = ForgetLocked(regions_.find(token), Pages::kFreed);
      // The client may free lent memory as soon as it is told; host memory is owned by the server.
      if (forgotten->device != SharedRegion::kHost) {
        if (closed) closed_.emplace(token, std::exchange(closed, {}));
      }
    } else {
      return Status(Code::kNotFound, "the token names no region of this connection");
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
  return clients_.at(found->second->client).ended ? nullptr : found->second;
}

void RegionRegistry::OnClosed(std::function<void()> closed) {
  const MutexLock lock(mutex_);
  on_closed_ = std::move(closed);
}

RegionRegistry::Stats RegionRegistry::stats() const {
  const MutexLock lock(mutex_);
  Stats stats = stats_;
  stats.clients = std::count_if(clients_.begin(), clients_.end(),
                                [](const auto& each) { return !each.second.ended; });
  stats.changing_bytes = ledger_.held() - stats.bytes;
  return stats;
}

void RegionRegistry::Reap(SharedRegion* region) {
  const MutexLock lock(mutex_);
  region->next = unreaped_;
  unreaped_ = region;
  if (!std::exchange(reaping_, true)) reaping_since_ = clock_.Now();
  changed_.NotifyOne();
}

void RegionRegistry::UncountLocked(uint64_t client, int tenant, int64_t bytes) {
  ledger_.Add(TenantOf(tenant), -bytes);
  const auto owner = clients_.find(client);
  if (owner == clients_.end()) return;
  owner->second.bytes -= bytes;
  --owner->second.regions;
  if (bytes == 0) --owner->second.lent;
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
    reaping_since_ = clock_.Now();
    const std::function<void()> closed = TakeClosedLocked(*region);
    CloseLocked(region);
    reaping_ = unreaped_ != nullptr;
    if (on_closed_) on_closed_();
    if (!closed) continue;
    lock.Unlock();
    closed();
    lock.Lock();
  }
}

void RegionRegistry::CloseLocked(SharedRegion* region) {
  const bool lent = region->device != SharedRegion::kHost;
  mutex_.Unlock();
  if (lent) {
    importer_->Release(std::move(region->imported));
  } else {
    memory_.Unlock(region->data, region->bytes);
    memory_.Unmap(region->data, region->bytes, region->pages);
  }
  mutex_.Lock();
  UncountLocked(region->client, region->tenant, lent ? 0 : region->bytes);
  if (lent) {
    --stats_.lent_regions;
    stats_.lent_bytes -= region->bytes;
  }
  delete region;
}

}  // namespace attend
