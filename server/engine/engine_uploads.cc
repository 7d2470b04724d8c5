// SPDX-License-Identifier: Apache-2.0
//
// The engine's part in how inputs get to a device: copied while they arrive, or read where they
// arrived.

#include <algorithm>

#include "server/engine/engine.h"
#include "server/memory/memory_reserve.h"
#include "server/split/split_parts.h"
#include "server/split/split_plan.h"
#include "server/upload/upload_plan.h"

namespace attend {

bool Engine::Gathers(const Request& request) const {
  // The checker reads tensors in their places.
  if (request.check || checker_->Sampled(request.id)) return false;
  const auto candidates =
      Candidates(request.attention.problem, request.kernel, SharedRegion::kHost);
  if (!candidates.ok() || WillSplit(Flops(request.attention), *candidates)) return false;
  return std::all_of(candidates->begin(), candidates->end(), [&](const Candidate& each) {
    const Backend& backend = *backends_[each.device];
    return backend.Gathers() && !backend.RunsInParts(request.attention, each.selection);
  });
}

void Engine::Stage(Request& request, std::span<const HostSpan> tensors) {
  if (!stager_->Wants(tensors)) return;
  auto candidates = Candidates(request.attention.problem, request.kernel, SharedRegion::kHost);
  if (!candidates.ok()) return;  // Submit says why
  if (WillSplit(Flops(request.attention), *candidates)) return stager_->CountSplit();
  if (!LimitCost(request.attention, *candidates).ok()) return;
  SetCosts(request, *candidates);
  request.staged = stager_->Stage(*candidates, request.input, tensors);
  if (request.staged != nullptr) request.upload_run = MakeUploadRun(request, *candidates);
}

std::shared_ptr<UploadRun> Engine::MakeUploadRun(Request& request,
                                                 std::span<const Candidate> candidates) {
  const int device = request.staged->device();
  const auto chosen = std::find_if(candidates.begin(), candidates.end(),
                                   [&](const Candidate& each) { return each.device == device; });
  const std::vector<AttentionSlice> parts =
      backends_[device]->Parts(request.attention, chosen->selection);
  std::vector<UploadGroup> groups =
      PlanUpload(request.attention, parts, options_.staging.bytes_min);
  if (groups.empty()) return nullptr;
  const int64_t group = request.attention.problem.group();
  std::vector<QuerySlice> pieces;
  for (const auto& [slice, unused] : groups) {
    pieces.push_back({0, slice.batch_begin, slice.batch_end, slice.heads_begin * group,
                      slice.heads_end * group, slice.rows_begin, slice.rows_end});
  }
  Result<std::vector<std::unique_ptr<Request>>> made = MakeParts(request, pieces, *host_pool_);
  if (!made.ok()) return nullptr;
  request.device = device;
  request.device_name = workers_[device]->info().name;
  request.selection = chosen->selection;
  uint64_t id = next_upload_part_.fetch_add(made->size(), std::memory_order_relaxed);
  const bool may_be_checked = request.check || checker_->Sampled(request.id);
  for (const auto& part : *made) {
    // The whole's kernel, whatever one would choose for the part; what it needs is less.
    const Result<Selection> selection = Select(part->attention.problem, workers_[device]->info(),
                                               KernelName(request.selection.kernel));
    if (!selection.ok()) return nullptr;
    part->selection = *selection;
    part->id = id++;
    part->check = may_be_checked;
  }
  UploadRun::Hooks hooks;
  hooks.push = [this](std::unique_ptr<Request>& part) {
    upload_parts_.fetch_add(1, std::memory_order_relaxed);
    Status status = PushPart(part);
    if (!status.ok()) upload_parts_.fetch_sub(1, std::memory_order_release);
    return status;
  };
  hooks.cancel = [this](int index, uint64_t part) { workers_[index]->Cancel(part); };
  hooks.finish = [this](std::unique_ptr<Request> whole) { FinishRun(std::move(whole)); };
  hooks.count_early = [this] { stager_->CountPart(); };
  return std::make_shared<UploadRun>(request, std::move(groups), std::move(*made),
                                     static_cast<int64_t>(workers_[device]->lanes()),
                                     std::move(hooks));
}

bool Engine::CompleteUpload(std::unique_ptr<Request>& request) {
  if (request->upload_run == nullptr) return false;
  const std::shared_ptr<UploadRun> run = request->upload_run;
  if (!run->begun()) {
    request->upload_run.reset();
    return false;
  }
  const OnNoMemory wait(OnNoMemory::kWait);  // parts of it may run
  const bool copied = request->staged->Seal();
  const bool lost = !workers_[request->device]->healthy();
  request->staged->CountRun(copied ? StagingEnd::kUsed
                            : lost ? StagingEnd::kDeviceLost
                                   : StagingEnd::kCopyFailed);
  run->Complete(std::move(request), copied);
  return true;
}

void Engine::FinishStaging(Request& request, std::span<const Candidate> candidates) {
  if (request.staged == nullptr) return;
  const bool there = std::any_of(candidates.begin(), candidates.end(), [&](const auto& each) {
    return each.device == request.staged->device();
  });
  if (!there) request.staged->Drop(StagingEnd::kDeviceLost);
  request.staged->Finish();
}

size_t Engine::Reserve(const Request& request, std::span<const Candidate> candidates) {
  for (size_t n = 0; request.staged != nullptr && n < candidates.size(); ++n) {
    if (candidates[n].device != request.staged->device()) continue;
    router_->Add(candidates[n].device, candidates[n].cost);
    return n;
  }
  return router_->Reserve(candidates);
}

}  // namespace attend
