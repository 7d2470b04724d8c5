// SPDX-License-Identifier: Apache-2.0
//
// The engine's bounds on what a request may cost: kernels, checks, and the end of its patience.

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "kernels/contract/cost.h"
#include "server/engine/engine.h"
#include "server/memory/memory_reserve.h"

namespace attend {
namespace {

constexpr double kRequestSecondsMax = 600;

std::string Gflop(double cost) {
  return std::to_string(static_cast<int64_t>(std::ceil(std::min(cost * 1e-9, 1e18))));
}

}  // namespace

double Engine::RequestCostMax(int device) const {
  if (!options_.request_cost_max.has_value()) {
    return kRequestSecondsMax * CostPerSecond(workers_[device]->info());
  }
  const double max = *options_.request_cost_max;
  return max > 0 ? max : std::numeric_limits<double>::infinity();
}

Status Engine::LimitCost(const Attention& attention, std::vector<Candidate>& candidates) const {
  Status refusal;
  std::erase_if(candidates, [&](Candidate& each) {
    each.kernel_cost = Cost(attention, each.selection.kernel);
    const double max = RequestCostMax(each.device);
    if (each.kernel_cost <= max) return false;
    refusal = InvalidArgument("the request costs " + Gflop(each.kernel_cost) + " GFLOP by " +
                              std::string(KernelName(each.selection.kernel)) + " on " +
                              workers_[each.device]->info().name + ", may cost at most " +
                              Gflop(max) + " (max-request-gflop)");
    return true;
  });
  return candidates.empty() ? refusal : Status();
}

Status Engine::CheckCost(const Request& request) const {
  Result<std::vector<Candidate>> candidates =
      Candidates(request.attention.problem, request.kernel, PinnedDevice(request));
  return candidates.ok() ? LimitCost(request.attention, *candidates) : candidates.status();
}

void Engine::SetCosts(const Request& request, std::vector<Candidate>& candidates) const {
  const int64_t tensor_bytes = request.input_spans.bytes() + request.output_spans.bytes();
  for (Candidate& each : candidates) {
    // The kernel's workspace too, so that one that keeps its score matrix runs alone and cannot
    // make its company fail.
    each.cost = batcher_.Cost(each.kernel_cost, tensor_bytes + each.selection.workspace_bytes);
  }
}

Status Engine::PlanCheck(Request& request) {
  if (!request.check) {
    // The checker reads tensors on the host only.
    const bool readable = PinnedDevice(request) == SharedRegion::kHost;
    if (!readable || !checker_->Sampled(request.id)) return Status();
    request.check = request.check_sampled = checker_->HasRoom() && checker_->Reserve();
    if (!request.check) metrics_.RecordCheck(CheckResult::kSkipped, request.transport);
    return Status();
  }
  if (checker_->Reserve()) return Status();
  metrics_.RecordCheck(CheckResult::kRefused, request.transport);
  return ResourceExhausted("check: " + std::to_string(options_.checker.places_max) +
                           " requests wait for their reference check, the limit (max-checks)");
}

void Engine::FinishChecked(std::unique_ptr<Request> request) {
  if (request->report.has_value()) {
    if (!request->report->ok && on_check_failed_) {
      try {
        const OnNoMemory no_memory(OnNoMemory::kThrow);
        on_check_failed_(*request);
      } catch (const std::bad_alloc&) {  // the answer says it all the same
      }
    }
  } else if (request->status.ok()) {
    metrics_.RecordCheck(CheckResult::kSkipped, request->transport);
  } else if (request->status.code() == Code::kResourceExhausted) {
    metrics_.RecordCheck(CheckResult::kRefused, request->transport);
  }
  FinishOne(std::move(request));
}

void Engine::Abort() {
  const Status status = Unavailable("the server ends, and the request was still queued");
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
