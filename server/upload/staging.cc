// SPDX-License-Identifier: Apache-2.0
//
// Apply rewrites the tensor pointers of a work item from the host block to the device copy. Both
// have the same layout, so a pointer moves by the difference of the bases. Only the arrays behind
// the tensors are still copied from the host.

#include "server/upload/staging.h"

#include <algorithm>
#include <cassert>

#include "server/memory/range_allocator.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

constexpr std::array<const char*, kStagingEndCount> kEndNames = {
    "used", "budget", "no_memory", "copy_failed", "device_lost", "queue_full", "aborted"};

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
                         int64_t bytes, int64_t piece_bytes)
    : budget_(budget),
      router_(router),
      device_(chosen.device),
      expected_cost_(chosen.cost),
      bytes_(bytes),
      pieces_(bytes, piece_bytes) {}

StagedInput::~StagedInput() {
  ForgetCost();
  if (!used_) Drop(StagingEnd::kAborted);
}

void StagedInput::ForgetCost() { router_.Forget(device_, std::exchange(expected_cost_, 0)); }

void StagedInput::Arrived(const char* data, int64_t bytes) {
  if (copy_ == nullptr) return;
  const int64_t begin = data - block();
  for (const ByteRange& piece : pieces_.Add({begin, begin + bytes})) {
    if (failed_.load(std::memory_order_relaxed)) return;
    const int64_t piece_bytes = piece.end - piece.begin;
    if (copy_->Copy(piece.begin, piece_bytes).ok()) {
      budget_.CountBytes(piece_bytes);
    } else {
      failed_.store(true, std::memory_order_relaxed);
    }
  }
}

bool StagedInput::Finish() {
  assert(!finished_ && "called twice");
  ForgetCost();
  if (copy_ == nullptr) return false;
  finished_ = !failed_.load(std::memory_order_relaxed) && copy_->Finish().ok();
  if (!finished_) Drop(StagingEnd::kCopyFailed);
  return finished_;
}

void StagedInput::Drop(StagingEnd why) {
  if (copy_ == nullptr) return;
  ForgetCost();
  budget_.CountEnd(why);
  copy_.reset();
}

void StagedInput::Apply(WorkItem* item) {
  if (copy_ == nullptr) return;
  assert(finished_ && "a kernel would read what is still being copied");
  if (!std::exchange(used_, true)) budget_.CountEnd(StagingEnd::kUsed);
  const auto move = [this](const void** tensor) {
    if (*tensor == nullptr) return;
    *tensor = copy_->data() + (static_cast<const char*>(*tensor) - block());
  };
  Attention& a = item->attention;
  // The new rows of K and V are appended to the pages.
  const bool in_pages = a.problem.page_rows > 0;
  move(&a.q.data);
  move(in_pages ? &item->append.k.data : &a.k.data);
  move(in_pages ? &item->append.v.data : &a.v.data);
  // A tree's bias lies behind the tensors, with the arrays.
  const auto is_tensor = [this](const void* data) {
    return static_cast<const char*>(data) - block() <= bytes_;  // at the end if it is empty
  };
  if (a.problem.has_bias && is_tensor(a.bias.data)) move(&a.bias.data);
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
  item->after[0] = copy_->after();
}

Stager::Stager(const StagingOptions& options, std::span<const std::unique_ptr<Backend>> backends,
               Router& router)
    : options_(options),
      backends_(backends),
      router_(router),
      budget_(LimitsOf(options.bytes_max, backends)) {
  for (int i = 0; i < budget_.devices(); ++i) possible_ |= budget_.limit(i).bytes_max > 0;
}

void Stager::Stage(Request& request, std::span<const HostSpan> tensors) {
  int64_t bytes = 0;
  for (const HostSpan& tensor : tensors) bytes += tensor.bytes;
  if (!possible_ || bytes < options_.bytes_min) return;
  const std::vector<Candidate>& candidates = request.placement.candidates;
  std::unique_ptr<StagedInput> copy =
      Make(candidates[router_.Expect(candidates)], request.input, tensors);
  if (copy != nullptr) request.source.Stage(std::move(copy));
}

std::unique_ptr<StagedInput> Stager::Make(const Candidate& chosen, HostBlock& block,
                                          std::span<const HostSpan> tensors) {
  char* const begin = static_cast<char*>(block.data());
  const auto end_of = [&](const HostSpan& tensor) {
    return static_cast<char*>(tensor.data) - begin + tensor.bytes;
  };
  const int64_t bytes = end_of(tensors.back());
  std::unique_ptr<StagedInput> staged(
      new StagedInput(budget_, router_, chosen, bytes, options_.piece_bytes));
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
  // Padding between tensors is never sent, so it counts as arrived.
  int64_t at = 0;
  for (const HostSpan& tensor : tensors) {
    const char* const data = static_cast<const char*>(tensor.data);
    if (data > begin + at) staged->Arrived(begin + at, data - begin - at);
    at = end_of(tensor);
  }
  return staged;
}

}  // namespace attend
