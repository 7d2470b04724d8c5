// SPDX-License-Identifier: Apache-2.0
//
// Begin checks everything under one lock before it takes anything, so a refusal changes nothing.
// Rates come before places because only a rate knows when to retry.
//
// Charge checks the rates again, without the request's own bytes (hold.begun_bytes_): otherwise a
// request larger than the burst would refuse itself.

#include "server/limits/tenant_limits.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cmath>
#include <string>

#include "server/util/rejection.h"

namespace attend {
namespace {

size_t Index(Limit limit) { return static_cast<size_t>(limit); }

// Saturates: a cost beyond 9e18 FLOPs is never paid off anyway.
int64_t WholeUnits(double cost) {
  constexpr double kMost = 9e18;
  return cost < kMost ? static_cast<int64_t>(std::ceil(cost)) : static_cast<int64_t>(kMost);
}

}  // namespace

LimitHold& LimitHold::operator=(LimitHold&& other) noexcept {
  if (this == &other) return *this;
  End(0, /*bytes_used=*/false, /*cost_used=*/false);
  limits_ = std::exchange(other.limits_, nullptr);
  tenant_ = other.tenant_;
  check_ = other.check_;
  small_ = other.small_;
  begun_bytes_ = other.begun_bytes_;
  bytes_ = other.bytes_;
  cost_ = other.cost_;
  retry_after_ms_ = other.retry_after_ms_;
  return *this;
}

void LimitHold::End(int64_t came, bool bytes_used, bool cost_used) {
  if (limits_ == nullptr) return;
  const int64_t bytes_back = bytes_used ? 0 : std::max<int64_t>(0, bytes_ - came);
  std::exchange(limits_, nullptr)->End(*this, bytes_back, cost_used ? 0 : cost_);
  begun_bytes_ = bytes_ = cost_ = 0;
}

CountHold& CountHold::operator=(CountHold&& other) noexcept {
  if (this == &other) return *this;
  Release();
  limits_ = std::exchange(other.limits_, nullptr);
  tenant_ = other.tenant_;
  limit_ = other.limit_;
  amount_ = other.amount_;
  return *this;
}

void CountHold::Release() {
  if (limits_ != nullptr) std::exchange(limits_, nullptr)->Return(tenant_, limit_, amount_);
}

TenantLimits::TenantLimits(const std::vector<TenantBounds>& bounds, const Clock& clock)
    : clock_(clock) {
  for (size_t i = 0; i < bounds.size(); ++i) tenants_.push_back(std::make_unique<Tenant>());
  Set(bounds);
}

void TenantLimits::Set(const std::vector<TenantBounds>& bounds) {
  assert(bounds.size() == tenants_.size());
  const TimePoint now = clock_.Now();
  for (size_t i = 0; i < bounds.size(); ++i) {
    Tenant& tenant = *tenants_[i];
    const MutexLock lock(tenant.mutex);
    tenant.bounds = bounds[i];
    tenant.bytes.SetRate(bounds[i].bytes, now);
    tenant.cost.SetRate(bounds[i].cost, now);
  }
}

bool TenantLimits::FitsLocked(const Tenant& tenant, Limit limit, int64_t amount) {
  return tenant.used[Index(limit)] <= tenant.bounds[limit] - amount;
}

Status TenantLimits::CheckCount(Tenant& tenant, Limit limit, int64_t amount) {
  if (FitsLocked(tenant, limit, amount)) return Status();
  ++tenant.refused[Index(limit)];
  const std::string more = amount == 1 ? "" : " and asks for " + std::to_string(amount) + " more";
  return ResourceExhausted(Rejection::kTenantLimit,
                           "tenant limit " + std::string(LimitKey(limit)) + ": the tenant has " +
                               std::to_string(tenant.used[Index(limit)]) + more +
                               ", may have at most " + std::to_string(tenant.bounds[limit]));
}

Status TenantLimits::CheckRate(Tenant& tenant, Limit limit, const TokenBucket& bucket, int64_t own,
                               TimePoint now, LimitHold& hold) {
  using std::chrono::milliseconds;
  const Duration wait = bucket.Wait(now, own);
  if (wait == Duration::zero()) return Status();
  ++tenant.refused[Index(limit)];
  hold.retry_after_ms_ = std::chrono::ceil<milliseconds>(wait) / milliseconds(1);
  const Rate& rate = bucket.rate();
  return ResourceExhausted(
      Rejection::kTenantLimit,
      "tenant limit " + std::string(LimitKey(limit)) + ": the tenant is " +
          std::to_string(bucket.Missing(now) - rate.burst) + " over its burst of " +
          std::to_string(rate.burst) + ", at a rate of " + std::to_string(rate.per_second) +
          (limit == Limit::kBytes ? " bytes" : " FLOPs of cost") + " a second; retry in " +
          std::to_string(hold.retry_after_ms_) + " ms");
}

Status TenantLimits::CheckRates(Tenant& tenant, TimePoint now, LimitHold& hold) {
  ATTEND_RETURN_IF_ERROR(
      CheckRate(tenant, Limit::kBytes, tenant.bytes, hold.begun_bytes_, now, hold));
  return CheckRate(tenant, Limit::kCost, tenant.cost, 0, now, hold);
}

Status TenantLimits::Begin(int index, bool check, LimitHold& hold, int64_t came) {
  assert(hold.limits_ == nullptr);
  hold.retry_after_ms_ = 0;
  Tenant& tenant = *tenants_[index];
  const TimePoint now = clock_.Now();
  const MutexLock lock(tenant.mutex);
  ATTEND_RETURN_IF_ERROR(CheckRates(tenant, now, hold));
  ATTEND_RETURN_IF_ERROR(CheckCount(tenant, Limit::kInFlight));
  if (check) ATTEND_RETURN_IF_ERROR(CheckCount(tenant, Limit::kChecks));
  ++tenant.used[Index(Limit::kInFlight)];
  if (check) ++tenant.used[Index(Limit::kChecks)];
  hold.limits_ = this;
  hold.tenant_ = index;
  hold.check_ = check;
  hold.small_ = false;
  // Owed bytes add at most as much as this request brings. If all clients of a tenant retry at
  // once, it still gets half of its rate, and the debt stays bounded.
  hold.bytes_ = came;
  hold.begun_bytes_ = came + std::min(came, std::exchange(tenant.owed_bytes, 0));
  tenant.bytes.Charge(hold.begun_bytes_, now);
  return Status();
}

Status TenantLimits::Spend(int index, int64_t bytes) {
  Tenant& tenant = *tenants_[index];
  const TimePoint now = clock_.Now();
  LimitHold none;
  const MutexLock lock(tenant.mutex);
  ATTEND_RETURN_IF_ERROR(CheckRate(tenant, Limit::kBytes, tenant.bytes, 0, now, none));
  tenant.bytes.Charge(bytes, now);
  return Status();
}

Status TenantLimits::BeginSmall(int index, LimitHold& hold, int64_t came) {
  assert(hold.limits_ == nullptr);
  Tenant& tenant = *tenants_[index];
  const TimePoint now = clock_.Now();
  const MutexLock lock(tenant.mutex);
  CameLocked(tenant, came, now);
  ATTEND_RETURN_IF_ERROR(CheckCount(tenant, Limit::kSmallCalls));
  ATTEND_RETURN_IF_ERROR(CheckCount(tenant, Limit::kInFlight));
  ++tenant.used[Index(Limit::kSmallCalls)];
  ++tenant.used[Index(Limit::kInFlight)];
  hold.limits_ = this;
  hold.tenant_ = index;
  hold.check_ = false;
  hold.small_ = true;
  return Status();
}

Status TenantLimits::Charge(int64_t bytes, double cost, LimitHold& hold) {
  assert(hold.limits_ == this && hold.cost_ == 0);
  Tenant& tenant = *tenants_[hold.tenant_];
  const TimePoint now = clock_.Now();
  const MutexLock lock(tenant.mutex);
  // Other requests may have been charged since Begin.
  ATTEND_RETURN_IF_ERROR(CheckRates(tenant, now, hold));
  const int64_t rest = std::max<int64_t>(0, bytes - hold.bytes_);
  hold.bytes_ += rest;
  hold.cost_ = WholeUnits(cost);
  tenant.bytes.Charge(rest, now);
  tenant.cost.Charge(hold.cost_, now);
  return Status();
}

void TenantLimits::Came(int index, int64_t bytes) {
  if (bytes == 0) return;
  Tenant& tenant = *tenants_[index];
  const TimePoint now = clock_.Now();
  const MutexLock lock(tenant.mutex);
  CameLocked(tenant, bytes, now);
}

void TenantLimits::CameLocked(Tenant& tenant, int64_t bytes, TimePoint now) {
  // No debt: a client that retries when told to must not be refused for bytes that others sent.
  const int64_t rest = tenant.bytes.ChargeWithoutDebt(bytes, now);
  tenant.owed_bytes += std::min(rest, kUnlimited - tenant.owed_bytes);
}

void TenantLimits::End(const LimitHold& hold, int64_t bytes_back, int64_t cost_back) {
  Tenant& tenant = *tenants_[hold.tenant_];
  const MutexLock lock(tenant.mutex);
  --tenant.used[Index(Limit::kInFlight)];
  if (hold.check_) --tenant.used[Index(Limit::kChecks)];
  if (hold.small_) --tenant.used[Index(Limit::kSmallCalls)];
  tenant.bytes.Return(bytes_back);
  tenant.cost.Return(cost_back);
}

Status TenantLimits::Take(int index, Limit limit, CountHold& hold, int64_t amount) {
  assert(amount >= 1);
  Tenant& tenant = *tenants_[index];
  {
    const MutexLock lock(tenant.mutex);
    ATTEND_RETURN_IF_ERROR(CheckCount(tenant, limit, amount));
    tenant.used[Index(limit)] += amount;
  }
  hold.Release();
  hold.limits_ = this;
  hold.tenant_ = index;
  hold.limit_ = limit;
  hold.amount_ = amount;
  return Status();
}

bool TenantLimits::Fits(int index, Limit limit, int64_t amount) const {
  const Tenant& tenant = *tenants_[index];
  const MutexLock lock(tenant.mutex);
  return FitsLocked(tenant, limit, amount);
}

void TenantLimits::Return(int index, Limit limit, int64_t amount) {
  Tenant& tenant = *tenants_[index];
  const MutexLock lock(tenant.mutex);
  assert(tenant.used[Index(limit)] >= amount);
  tenant.used[Index(limit)] -= amount;
}

int64_t TenantLimits::most(int index, Limit limit) const {
  const Tenant& tenant = *tenants_[index];
  const MutexLock lock(tenant.mutex);
  return tenant.bounds[limit];
}

void TenantLimits::CountRefusal(int index, Limit limit) {
  Tenant& tenant = *tenants_[index];
  const MutexLock lock(tenant.mutex);
  ++tenant.refused[Index(limit)];
}

TenantLimits::Use TenantLimits::use(int index, Limit limit) const {
  const Tenant& tenant = *tenants_[index];
  const TimePoint now = clock_.Now();
  const MutexLock lock(tenant.mutex);
  Use use{tenant.used[Index(limit)], tenant.bounds[limit], tenant.refused[Index(limit)]};
  if (limit != Limit::kBytes && limit != Limit::kCost) return use;
  const TokenBucket& bucket = limit == Limit::kBytes ? tenant.bytes : tenant.cost;
  use.used = bucket.Missing(now);
  use.most = bucket.rate().bounded() ? bucket.rate().burst : kUnlimited;
  use.per_second = bucket.rate().per_second;
  return use;
}

}  // namespace attend
