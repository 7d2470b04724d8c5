// SPDX-License-Identifier: Apache-2.0
//
// The engine's part in how inputs get to a device: copied while they arrive, or read where they
// arrived.

#include <algorithm>

#include "server/engine.h"

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
  const double flops = Flops(request.attention);
  if (WillSplit(flops, *candidates)) return stager_->CountSplit();
  SetCosts(request, flops, *candidates);
  request.staged = stager_->Stage(*candidates, request.input, tensors);
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
