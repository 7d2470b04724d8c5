// SPDX-License-Identifier: Apache-2.0
//
// What Engine does for uploads, which are copied to a device, and computed, while they arrive.

#include <algorithm>

#include "server/engine/engine.h"
#include "server/memory/memory_reserve.h"
#include "server/split/split_parts.h"
#include "server/upload/upload_plan.h"

namespace attend {

void Engine::Stage(Request& request, std::span<const HostSpan> tensors) {
  if (!stager_->Wants(tensors)) return;
  const Placement& placement = request.placement;
  if (!placement.shards.empty()) return stager_->CountSplit();
  std::unique_ptr<StagedInput> copy = stager_->Stage(placement.candidates, request.input, tensors);
  if (copy == nullptr) return;
  request.source.Stage(std::move(copy));
  // Nothing of a session's request can be computed before its append, which is all or nothing, and
  // a backward pass is computed as one.
  if (request.source.cache() != nullptr || request.backward) return;
  request.source.staged()->run = MakeUploadRun(request);
}

std::shared_ptr<UploadRun> Engine::MakeUploadRun(Request& request) {
  const std::vector<Candidate>& candidates = request.placement.candidates;
  const int device = request.source.copy()->device();
  const auto chosen = std::find_if(candidates.begin(), candidates.end(),
                                   [&](const Candidate& each) { return each.device == device; });
  const std::vector<AttentionSlice> parts =
      backends_[device]->Parts(request.attention, chosen->selection);
  std::vector<UploadGroup> groups =
      PlanUpload(request.attention, parts, options_.staging.bytes_min);
  if (groups.empty()) return nullptr;
  const int64_t group = request.attention.problem.group();
  std::vector<QuerySlice> slices;
  for (const auto& [slice, unused] : groups) {
    slices.push_back({0, slice.batch_begin, slice.batch_end, slice.heads_begin * group,
                      slice.heads_end * group, slice.rows_begin, slice.rows_end});
  }
  Result<std::vector<std::unique_ptr<Request>>> made = MakeParts(request, slices, *host_pool_);
  if (!made.ok()) return nullptr;
  request.device = device;
  request.device_name = workers_[device]->info().name;
  request.selection = chosen->selection;
  uint64_t id = TakePartIds(made->size());
  for (const auto& part : *made) {
    // The whole's kernel, even if Select would choose another for the part. The part needs less.
    const Result<Selection> selection = Select(part->attention.problem, workers_[device]->info(),
                                               KernelName(request.selection.kernel));
    if (!selection.ok()) return nullptr;
    part->selection = *selection;
    part->id = id++;
  }
  UploadRun::Hooks hooks;
  hooks.push = [this](std::unique_ptr<Request>& part) {
    upload_parts_.fetch_add(1, std::memory_order_relaxed);
    Status status = PushPart(part);
    if (!status.ok()) upload_parts_.fetch_sub(1, std::memory_order_release);
    return status;
  };
  hooks.cancel = [this](int index, uint64_t part) { workers_[index]->Cancel(part); };
  hooks.finish = [this](std::unique_ptr<Request> whole) { RunDone(std::move(whole)); };
  hooks.count_early = [this] { stager_->CountPart(); };
  return std::make_shared<UploadRun>(request, std::move(groups), std::move(*made),
                                     static_cast<int64_t>(workers_[device]->lanes()),
                                     std::move(hooks));
}

bool Engine::CompleteUpload(std::unique_ptr<Request>& request) {
  StagedUpload* const staged = request->source.staged();
  if (staged == nullptr || staged->run == nullptr) return false;
  const std::shared_ptr<UploadRun> run = staged->run;
  if (!run->begun()) {
    staged->run.reset();
    return false;
  }
  const OnNoMemory wait(OnNoMemory::kWait);  // parts of it may run
  const bool copied = staged->copy->Seal();
  const bool lost = !workers_[request->device]->healthy();
  staged->copy->CountRun(copied ? StagingEnd::kUsed
                         : lost ? StagingEnd::kDeviceLost
                                : StagingEnd::kCopyFailed);
  run->Complete(std::move(request), copied);
  return true;
}

void Engine::FinishStaging(Request& request) {
  DeviceCopy* const copy = request.source.copy();
  if (copy == nullptr) return;
  const std::vector<Candidate>& candidates = request.placement.candidates;
  const bool there = std::any_of(candidates.begin(), candidates.end(),
                                 [&](const auto& each) { return each.device == copy->device(); });
  if (!there) copy->Drop(StagingEnd::kDeviceLost);
  copy->Finish();
}

size_t Engine::Reserve(Request& request, std::span<const Candidate> candidates) {
  const DeviceCopy* const copy = request.source.copy();
  for (size_t n = 0; copy != nullptr && n < candidates.size(); ++n) {
    if (candidates[n].device != copy->device()) continue;
    router_->Add(candidates[n].device, candidates[n].cost);
    return n;
  }
  return router_->Reserve(candidates);
}

}  // namespace attend
