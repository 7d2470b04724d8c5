// SPDX-License-Identifier: Apache-2.0

#include "client/memory/region_pool.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

namespace attend::client {
namespace {

constexpr size_t kIdleMax = 8;
constexpr int64_t kIdleBytesMax = int64_t{1} << 30;  // one region may exceed it
constexpr int64_t kBytesMin = int64_t{64} << 10;

// Rounds up by at most an eighth, so that calls of similar size reuse each other's regions.
int64_t RoundUp(int64_t bytes) {
  const int64_t step =
      std::max(kBytesMin, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)) / 8));
  return bytes > INT64_MAX - step ? bytes : (bytes + step - 1) / step * step;
}

}  // namespace

RegionPool::RegionPool(std::shared_ptr<SharedMemory> memory)
    : RegionPool(memory, [memory](int64_t bytes) { return memory->Create(bytes); }) {}

Result<std::shared_ptr<SharedRegion>> RegionPool::Make(int64_t bytes, int64_t wished) {
  Result<std::shared_ptr<SharedRegion>> made = make_(wished);
  if (made.ok() || made.status().code() == Code::kUnavailable) return made;
  std::vector<std::shared_ptr<SharedRegion>> idle;
  {
    const MutexLock lock(mutex_);
    idle.swap(idle_);
  }
  if (idle.empty()) return made;
  idle.clear();
  return make_(bytes);
}

Result<std::shared_ptr<SharedRegion>> RegionPool::Take(int64_t bytes) {
  {
    const MutexLock lock(mutex_);
    // Best fit, but at most about twice the size needed: a small call must not hold a large region.
    auto best = idle_.end();
    for (auto each = idle_.begin(); each != idle_.end(); ++each) {
      const int64_t has = (*each)->bytes();
      if (has < bytes || has / 2 > std::max(bytes, kBytesMin)) continue;
      if (best == idle_.end() || has < (*best)->bytes()) best = each;
    }
    if (best != idle_.end()) {
      std::shared_ptr<SharedRegion> region = std::move(*best);
      idle_.erase(best);
      return region;
    }
  }
  return Make(bytes, RoundUp(bytes));
}

void RegionPool::GiveBack(std::shared_ptr<SharedRegion> region) {
  std::vector<std::shared_ptr<SharedRegion>> gone;  // destroyed without the lock
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(region));
  int64_t bytes = 0;
  for (const auto& each : idle_) bytes += each->bytes();
  // The oldest are dropped, so that regions of a call size no longer in use do not stay.
  while (idle_.size() > kIdleMax || (idle_.size() > 1 && bytes > kIdleBytesMax)) {
    bytes -= idle_.front()->bytes();
    gone.push_back(std::move(idle_.front()));
    idle_.erase(idle_.begin());
  }
}

Result<std::byte*> RegionPool::Allocate(int64_t bytes) {
  // A new region: an idle one may still hold another call's bytes.
  bytes = std::max<int64_t>(bytes, 1);
  Result<std::shared_ptr<SharedRegion>> region = Make(bytes, bytes);
  if (!region.ok()) return region.status();
  std::byte* const data = (*region)->data();
  const MutexLock lock(mutex_);
  allocated_.emplace(data, std::move(*region));
  return data;
}

bool RegionPool::Free(const void* data) {
  std::shared_ptr<SharedRegion> region;
  const MutexLock lock(mutex_);
  const auto found = allocated_.find(static_cast<const std::byte*>(data));
  if (found == allocated_.end()) return false;
  region = std::move(found->second);
  allocated_.erase(found);
  return true;
}

std::optional<SharedPlace> RegionPool::Find(const void* data, int64_t bytes) const {
  const auto* const at = static_cast<const std::byte*>(data);
  const MutexLock lock(mutex_);
  const auto after = allocated_.upper_bound(at);
  if (after == allocated_.begin()) return std::nullopt;
  const std::shared_ptr<SharedRegion>& region = std::prev(after)->second;
  const int64_t offset = at - region->data();
  if (offset > region->bytes() || bytes > region->bytes() - offset) return std::nullopt;
  if (offset % kSharedAlignBytes != 0) return std::nullopt;
  return SharedPlace{region, offset};
}

}  // namespace attend::client
