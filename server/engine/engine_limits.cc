// SPDX-License-Identifier: Apache-2.0
//
// Engine's deadlines, checks and Abort.

#include <string>
#include <utility>

#include "server/engine/engine.h"
#include "server/engine/least_refusal.h"
#include "server/memory/memory_reserve.h"
#include "server/util/rejection.h"

namespace attend {

Status Engine::CheckInTime(Request& request) {
  if (request.deadline == kNever) return Status();
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
  request.check = AnswerCheck::kSkipped;
  metrics_.RecordCheck(CheckResult::kRefused, request.transport);
  return ResourceExhausted(
      Rejection::kChecks,
      "check: " + std::to_string(options_.checker.places_max) +
          " requests are waiting for their reference check, the limit (max-checks)");
}

void Engine::CheckDone(std::unique_ptr<Request> request) {
  if (request->report.has_value()) {
    if (request->report->failed() && !request->report->of_inputs && on_check_failed_) {
      TryAllocating([&] { on_check_failed_(*request); });  // the answer reports the failure anyway
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
