// SPDX-License-Identifier: Apache-2.0
//
// Decides where and how a request runs: on which devices and at what cost. It also
// decides whether the devices may read the tensors where their message arrived, which
// RequestReader::Gather then does if sizes and pieces allow. Pure: the decision follows from the
// problem, where its tensors are and a snapshot of the devices, never from load. Load counts when
// the request is queued (schedule/router.h).

#pragma once

#include <span>
#include <string_view>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"

namespace attend {

// A device as the decision sees it.
struct PlaceableDevice {
  const Backend* backend = nullptr;
  bool healthy = true;
  double cost_max = 0;  // kernel cost of one request; infinite: no bound
};

// Returns the healthy devices that can run that pass of the problem; only `pinned` may, unless that
// is kAnyDevice. Never empty. UNIMPLEMENTED or INVALID_ARGUMENT (Select's reason), UNAVAILABLE (no
// healthy device, or those that could run it are lost).
Result<std::vector<Candidate>> FindCandidates(const Problem& problem, Pass pass,
                                              std::string_view kernel, int pinned,
                                              std::span<const PlaceableDevice> devices);

// The cost of the request on a device with that kernel.
double KernelCost(const Request& request, KernelId kernel);

// Sets the request's flops, the rest of its placement and, if the server wants the answer checked
// (`sampled`) and the client did not ask, its check. The candidates and the spans must be set, and
// the attention's arrays must have their values. INVALID_ARGUMENT if the attention costs more than
// any candidate's cost_max. UNAVAILABLE if the tensors are already gathered and no candidate can
// read them there.
Status Decide(const Batcher& batcher, std::span<const PlaceableDevice> devices, bool sampled,
              Request& request);

}  // namespace attend
