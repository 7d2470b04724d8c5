// SPDX-License-Identifier: Apache-2.0
//
// Decides on which devices and at what cost a request runs, and whether the devices may read the
// tensors where their message arrived; RequestReader::Gather then does so if sizes and pieces
// allow. Pure: the decision follows from the problem, the place of its tensors and a snapshot of
// the devices' health, never from load. Load counts when the request is queued (schedule/router.h).

#pragma once

#include <span>
#include <string_view>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"

namespace attend {

// A device as placement sees it.
struct PlaceableDevice {
  const Backend* backend = nullptr;
  bool healthy = true;
  double cost_max = 0;  // kernel cost of one request; infinite: unbounded
};

// Returns the healthy devices that can run this pass of the problem, never empty; only `pinned` is
// considered, unless that is kAnyDevice. UNIMPLEMENTED or INVALID_ARGUMENT (Select's reason),
// UNAVAILABLE (no healthy device, or those that could run it are lost).
Result<std::vector<Candidate>> FindCandidates(const Problem& problem, Pass pass,
                                              std::string_view kernel, int pinned,
                                              std::span<const PlaceableDevice> devices);

// The cost of the request with that kernel.
double KernelCost(const Request& request, KernelId kernel);

// Sets the request's flops, the rest of its placement and, if the server samples it (`sampled`) and
// the client asked for no check, its check. The candidates, the spans and the values of the
// attention's arrays must be set. INVALID_ARGUMENT if the attention exceeds every candidate's
// cost_max.
Status Decide(const Batcher& batcher, std::span<const PlaceableDevice> devices, bool sampled,
              Request& request);

}  // namespace attend
