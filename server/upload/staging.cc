// SPDX-License-Identifier: Apache-2.0

#include "server/upload/staging.h"

#include <algorithm>
#include <cassert>

#include "server/memory/range_allocator.h"
#include "server/request/request.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

constexpr std::array<const char*, kStagingEndCount> kEndNames = {
    "used", "budget", "no_memory", "split", "copy_failed", "device_lost", "queue_full", "aborted"};

std::vector<StagingBudget::Limit> LimitsOf(int64_t bytes_max,
                                           std::span<const std::unique_ptr<Backend>> backends) {
  std::vector<StagingBudget::Limit> limits;
  for (const auto& backend : backends) {
    const int64_t share =
        backend->CanStage() ? backend->info().memory_bytes / thresholds::kStagingDeviceShare : 0;
    limits.push_back({backend->info().name, std::min(bytes_max, share)});
  }
  return limits;
}

}  // namespace

const char* StagingEndName(StagingEnd end) { return kEndNames[static_cast<size_t>(end)]; }

StagingBudget::StagingBudget(std::vector<Limit> limits)
    : limits_(std::move(limits)), held_bytes_(limits_.size(), 0) {}

StagingBudget::~StagingBudget() {
  const MutexLock lock(mutex_);
  while (holds_ > 0) returned_.Wait(mutex_);
}

std::optional<StagingBudget::Hold> StagingBudget::Take(int device, int64_t bytes) {
  const MutexLock lock(mutex_);
  if (bytes > limits_[device].bytes_max - held_bytes_[device]) return std::nullopt;
  held_bytes_[device] += bytes;
  ++holds_;
  return Hold(*this, device, bytes);
}

void StagingBudget::Return(int device, int64_t bytes) {
  const MutexLock lock(mutex_);
  held_bytes_[device] -= bytes;
  --holds_;
  assert(held_bytes_[device] >= 0 && holds_ >= 0);
  returned_.NotifyAll();  // under the lock: the budget may be destroyed right after
}

int64_t StagingBudget::held_bytes(int device) const {
  const MutexLock lock(mutex_);
  return held_bytes_[device];
}

StagedInput::StagedInput(StagingBudget& budget, Router& router, const Candidate& chosen,
                         int64_t bytes, int64_t piece_bytes, const std::vector<int64_t>& tensors)
    : budget_(budget),
      router_(router),
      device_(chosen.device),
      whole_cost_(Router::BoundedCost(chosen.cost)),
      expected_cost_(whole_cost_),
      bytes_(bytes),
      pieces_(bytes, piece_bytes, tensors) {}

StagedInput::~StagedInput() {
  ForgetCost();
  if (copy_ != nullptr) Count(StagingEnd::kAborted);
}

void StagedInput::ForgetCost() {
  const int64_t cost = expected_cost_.exchange(0, std::memory_order_relaxed);
  if (cost != 0) router_.Forget(device_, cost);
}

void StagedInput::ForgetShare(int64_t parts) {
  const int64_t share = whole_cost_ / parts;
  int64_t left = expected_cost_.load(std::memory_order_relaxed);
  while (!expected_cost_.compare_exchange_weak(left, std::max<int64_t>(0, left - share),
                                               std::memory_order_relaxed)) {
  }
  router_.Forget(device_, std::min(left, share));
}

void StagedInput::Count(StagingEnd end) {
  if (!std::exchange(counted_, true)) budget_.CountEnd(end);
}

std::vector<ByteRange> StagedInput::Arrived(const char* data, int64_t bytes) {
  if (copy_ == nullptr || failed_.load(std::memory_order_relaxed)) return {};
  const int64_t begin = data - block();
  return pieces_.Add({begin, begin + bytes});
}

bool StagedInput::Copy(std::span<const ByteRange> pieces) {
  for (const ByteRange& piece : pieces) {
    if (failed_.load(std::memory_order_relaxed)) return false;
    const int64_t bytes = piece.end - piece.begin;
    if (!copy_->Copy(piece.begin, bytes).ok()) {
      failed_.store(true, std::memory_order_relaxed);
      return false;
    }
    budget_.CountBytes(bytes);
  }
  return true;
}

Result<const DeviceEvent*> StagedInput::Mark() {
  if (failed_.load(std::memory_order_relaxed)) return Internal("copying an upload has failed");
  return copy_->Mark();
}

bool StagedInput::Seal() {
  ForgetCost();
  if (copy_ == nullptr) return false;
  if (!std::exchange(sealed_, true)) {
    good_ = !failed_.load(std::memory_order_relaxed) && copy_->Finish().ok();
  }
  return good_;
}

bool StagedInput::Finish() {
  if (Seal()) return true;
  Drop(StagingEnd::kCopyFailed);
  return false;
}

void StagedInput::Drop(StagingEnd why) {
  if (copy_ == nullptr) return;
  Count(why);
  copy_.reset();
}

void StagedInput::Apply(WorkItem* item, const DeviceEvent* after) {
  if (copy_ == nullptr) return;
  assert((after != nullptr || good_) && "a kernel would read what is still being copied");
  if (after == nullptr) Count(StagingEnd::kUsed);
  const auto move = [this](const void** tensor) {
    if (*tensor == nullptr) return;
    *tensor = copy_->data() + (static_cast<const char*>(*tensor) - block());
  };
  Attention& a = item->attention;
  const bool in_pages = a.problem.page_rows > 0;  // what came of K and V is to be appended there
  move(&a.q.data);
  move(in_pages ? &item->append.k.data : &a.k.data);
  move(in_pages ? &item->append.v.data : &a.v.data);
  if (a.problem.has_bias) move(&a.bias.data);
  if (item->gradients) {
    move(const_cast<const void**>(&a.o.data));
    const auto move_numbers = [&](auto& numbers) {
      const void* place = numbers;
      move(&place);
      numbers = static_cast<float*>(const_cast<void*>(place));
    };
    move_numbers(a.lse);
    move(&item->gradients->d_o.data);
    move_numbers(item->gradients->d_lse);
  }
  // The arrays begin at the next aligned offset.
  const int64_t end = held_->block.bytes();
  const int64_t arrays =
      std::min(end, (bytes_ + kTensorAlignBytes - 1) / kTensorAlignBytes * kTensorAlignBytes);
  item->inputs = {{static_cast<char*>(held_->block.data()) + arrays, end - arrays}};
  item->in_place.Add({copy_->data(), bytes_});
  item->after[0] = after != nullptr ? after : copy_->after();
}

Stager::Stager(const StagingOptions& options, std::span<const std::unique_ptr<Backend>> backends,
               Router& router)
    : options_(options),
      backends_(backends),
      router_(router),
      budget_(LimitsOf(options.bytes_max, backends)) {
  for (int i = 0; i < budget_.devices(); ++i) possible_ |= budget_.limit(i).bytes_max > 0;
}

bool Stager::Wants(std::span<const HostSpan> tensors) const {
  int64_t bytes = 0;
  for (const HostSpan& tensor : tensors) bytes += tensor.bytes;
  return possible_ && bytes >= options_.bytes_min;
}

std::unique_ptr<StagedInput> Stager::Stage(std::span<const Candidate> candidates, HostBlock& block,
                                           std::span<const HostSpan> tensors) {
  char* const begin = static_cast<char*>(block.data());
  const auto end_of = [&](const HostSpan& tensor) {
    return static_cast<char*>(tensor.data) - begin + tensor.bytes;
  };
  const int64_t bytes = end_of(tensors.back());
  std::vector<int64_t> begins;
  for (const HostSpan& tensor : tensors) begins.push_back(static_cast<char*>(tensor.data) - begin);
  const Candidate& chosen = candidates[router_.Expect(candidates)];
  std::unique_ptr<StagedInput> staged(
      new StagedInput(budget_, router_, chosen, bytes, options_.piece_bytes, begins));
  if (!backends_[chosen.device]->CanStage()) return nullptr;
  std::optional<StagingBudget::Hold> hold = budget_.Take(chosen.device, bytes);
  if (!hold.has_value()) {
    budget_.CountEnd(StagingEnd::kBudget);
    return nullptr;
  }
  staged->held_ =
      std::make_shared<StagedInput::Held>(StagedInput::Held{std::move(*hold), std::move(block)});
  Result<std::unique_ptr<Staging>> copy =
      backends_[chosen.device]->MakeStaging({begin, bytes}, staged->held_);
  if (!copy.ok()) {
    budget_.CountEnd(StagingEnd::kNoMemory);
    block = std::move(staged->held_->block);
    return nullptr;
  }
  staged->copy_ = std::move(*copy);
  // The bytes between the tensors are not sent.
  int64_t at = 0;
  for (const HostSpan& tensor : tensors) {
    const int64_t first = static_cast<char*>(tensor.data) - begin;
    if (first > at) staged->Copy(staged->pieces_.Add({at, first}));
    at = end_of(tensor);
  }
  return staged;
}

}  // namespace attend
