// SPDX-License-Identifier: Apache-2.0
//
// Engine's choice of a device, its checks and deadlines, and Abort.

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "server/engine/engine.h"
#include "server/engine/least_refusal.h"
#include "server/memory/memory_reserve.h"

namespace attend {

void Engine::Choose(const Candidate& candidate, Request& request) {
  request.device = candidate.device;
  request.selection = candidate.selection;
  request.kernel_cost = candidate.kernel_cost;
  request.in_parts = candidate.in_parts;
  request.batch_bytes = request.input_spans.bytes() + request.output_spans.bytes() +
                        candidate.selection.workspace_bytes;
}

size_t Engine::Reserve(Request& request, std::span<const Candidate> candidates) {
  DeviceCopy* const copy = request.source.copy();
  if (copy == nullptr || copy->device() < 0) return router_->Reserve(candidates);
  const auto chosen = std::find_if(candidates.begin(), candidates.end(),
                                   [&](const auto& each) { return each.device == copy->device(); });
  if (chosen == candidates.end()) {
    copy->Drop(StagingEnd::kDeviceLost);
  } else if (copy->Finish()) {
    router_->Add(chosen->device, chosen->cost);
    return static_cast<size_t>(chosen - candidates.begin());
  }
  return router_->Reserve(candidates);
}

Status Engine::CheckInTime(Request& request) {
  if (request.deadline == kNever || !request.placement.shards.empty()) return Status();
  LeastRefusal refused;
  for (const Candidate& each : request.placement.candidates) {
    Choose(each, request);
    Status status = workers_[each.device]->Judge(request);
    if (status.ok()) return status;
    refused.Add(std::move(status), request.refusal);
  }
  return refused.Tell(request.refusal);
}

Status Engine::PlanCheck(Request& request) {
  if (!request.to_be_checked()) return Status();
  const bool sampled = request.check == AnswerCheck::kSampled;
  if ((!sampled || checker_->HasRoom()) && checker_->Reserve()) return Status();
  if (sampled) {
    request.check = AnswerCheck::kSkipped;
    metrics_.RecordCheck(CheckResult::kSkipped, request.transport);
    return Status();
  }
  request.check = AnswerCheck::kSkipped;  // it has no place, and its refusal is told by that
  metrics_.RecordCheck(CheckResult::kRefused, request.transport);
  return ResourceExhausted("check: " + std::to_string(options_.checker.places_max) +
                           " requests wait for their reference check, the limit (max-checks)");
}

void Engine::CheckDone(std::unique_ptr<Request> request) {
  if (request->report.has_value()) {
    if (request->report->failed() && !request->report->of_inputs && on_check_failed_) {
      try {
        const OnNoMemory no_memory(OnNoMemory::kThrow);
        on_check_failed_(*request);
      } catch (const std::bad_alloc&) {  // the answer still reports it
      }
    }
  } else if (request->status.ok()) {
    metrics_.RecordCheck(CheckResult::kSkipped, request->transport);
  } else if (request->status.code() == Code::kResourceExhausted) {
    metrics_.RecordCheck(CheckResult::kRefused, request->transport);
  }
  EndRequest(std::move(request));
}

void Engine::Abort() {
  const Status status = Unavailable("the server is stopping, and the request was still queued");
  for (const auto& worker : workers_) worker->Abort(status);
  checker_->Abort();
}

std::vector<BusyRequest> Engine::Running() const {
  std::vector<BusyRequest> running;
  for (const auto& worker : workers_) worker->AddBusy(running);
  checker_->AddBusy(running);
  return running;
}

}  // namespace attend
