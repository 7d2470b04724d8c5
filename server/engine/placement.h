// SPDX-License-Identifier: Apache-2.0
//
// Decides where and how a request runs: on which devices it may, at what cost, split or whole, and
// whether they may read its tensors where their message arrived, as RequestReader::Gather then does
// if sizes and pieces allow. Pure: the decision follows from the problem, where its tensors are and
// a snapshot of the devices, never from load. The load is looked at when the request is queued
// (schedule/router.h).

#pragma once

#include <span>
#include <string_view>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"
#include "server/schedule/router.h"

namespace attend {

// A device as the decision sees it.
struct PlaceableDevice {
  const Backend* backend = nullptr;
  bool healthy = true;
  double cost_max = 0;  // kernel cost of one request; infinite: no bound
};

struct PlacementRules {
  double split_flops_min = 0;  // larger requests are split over devices that are alike; 0: none
  const Batcher& batcher;      // what requests cost
  const Router& router;        // which devices are alike
};

// The healthy devices that can run the problem; `pinned`, unless it is SharedRegion::kHost, is the
// only one that may. Never none: UNIMPLEMENTED or INVALID_ARGUMENT (Select's reason), UNAVAILABLE
// (no healthy device, or those that could are lost).
Result<std::vector<Candidate>> FindCandidates(const Problem& problem, std::string_view kernel,
                                              int pinned, std::span<const PlaceableDevice> devices);

// Decides the rest of the placement, whose candidates are set, and the request's flops. The
// attention's arrays have their values, the spans are set. `sampled`: the server wants the answer
// checked. INVALID_ARGUMENT if the attention costs more than any candidate's cost_max.
// If tensors are gathered already, UNAVAILABLE if no candidate can read them there.
Status Decide(const PlacementRules& rules, std::span<const PlaceableDevice> devices, bool sampled,
              Request& request);

}  // namespace attend
