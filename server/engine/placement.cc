// SPDX-License-Identifier: Apache-2.0
//
// Only facts that stay true until the request runs are used here, so the decision can be made once
// and remembered. Load changes all the time and is left to the router.

#include "server/engine/placement.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/contract/cost.h"

namespace attend {
namespace {

std::string Gflop(double cost) {
  return std::to_string(static_cast<int64_t>(std::ceil(std::min(cost * 1e-9, 1e18))));
}

// Sets the candidates' costs and drops those whose cost_max the attention exceeds.
Status LimitCost(const Batcher& batcher, std::span<const PlaceableDevice> devices,
                 const Request& request, std::vector<Candidate>& candidates) {
  const int64_t tensor_bytes = request.input_spans.bytes() + request.output_spans.bytes();
  Status refusal;
  std::erase_if(candidates, [&](Candidate& each) {
    const PlaceableDevice& device = devices[each.device];
    each.kernel_cost = KernelCost(request, each.selection.kernel);
    // Workspace counts too: a kernel that materialises its score matrix then runs alone, and cannot
    // make the rest of a batch fail for lack of memory.
    each.cost = batcher.Cost(each.kernel_cost, tensor_bytes + each.selection.workspace_bytes);
    if (each.kernel_cost <= device.cost_max) return false;
    refusal = InvalidArgument("the request costs " + Gflop(each.kernel_cost) + " GFLOP with " +
                              std::string(KernelName(each.selection.kernel)) + " on " +
                              device.backend->info().name + ", may cost at most " +
                              Gflop(device.cost_max) + " (max-request-gflop)");
    return true;
  });
  return candidates.empty() ? refusal : Status();
}

}  // namespace

double KernelCost(const Request& request, KernelId kernel) {
  return request.backward ? BackwardCost(request.attention, kernel)
                          : Cost(request.attention, kernel);
}

Result<std::vector<Candidate>> FindCandidates(const Problem& problem, Pass pass,
                                              std::string_view kernel, int pinned,
                                              std::span<const PlaceableDevice> devices) {
  std::vector<Candidate> candidates;
  Status refusal;
  Status lost;
  for (size_t i = 0; i < devices.size(); ++i) {
    const auto& [backend, healthy, unused] = devices[i];
    if (pinned != kAnyDevice && static_cast<int>(i) != pinned) continue;
    const Result<Selection> selected = pass == Pass::kBackward
                                           ? SelectBackward(problem, backend->info(), kernel)
                                           : Select(problem, backend->info(), kernel);
    if (!selected.ok()) {
      if (healthy) refusal = selected.status();
    } else if (healthy) {
      candidates.push_back({static_cast<int>(i), *selected});
    } else {
      lost = Unavailable("device " + backend->info().name +
                         (pinned == kAnyDevice ? ", which could run this, is lost"
                                               : ", where the tensors are, is lost"));
    }
  }
  if (!candidates.empty()) return candidates;
  if (refusal.ok()) refusal = Unavailable("no device is healthy");
  if (pinned != kAnyDevice && !lost.ok()) return lost;
  // UNAVAILABLE, not the other devices' refusal: the request may run on another server, or here
  // after a restart.
  const bool some_healthy = refusal.code() != Code::kUnavailable;
  return some_healthy && !lost.ok() ? lost : refusal;
}

Status Decide(const Batcher& batcher, std::span<const PlaceableDevice> devices, bool sampled,
              Request& request) {
  Placement& placement = request.placement;
  ATTEND_RETURN_IF_ERROR(LimitCost(batcher, devices, request, placement.candidates));
  const bool forward = !request.backward;  // the backward pass is never split
  request.flops = forward ? Flops(request.attention) : BackwardFlops(request.attention);
  for (Candidate& each : placement.candidates) {
    each.in_parts =
        forward && devices[each.device].backend->RunsInParts(request.attention, each.selection);
  }
  const auto reads_pieces = [&](const Candidate& each) {
    return !each.in_parts && devices[each.device].backend->Gathers();
  };
  if (request.check == AnswerCheck::kNone && sampled && request.source.CanBeChecked()) {
    request.check = AnswerCheck::kSampled;
  }
  placement.may_gather =
      !request.to_be_checked() &&
      std::all_of(placement.candidates.begin(), placement.candidates.end(), reads_pieces);
  return Status();
}

}  // namespace attend
