// SPDX-License-Identifier: Apache-2.0
//
// Finds the tensors of a request that lie in regions: of shared memory, or of a GPU's memory that a
// client lends. Everything that decides about memory is
// in the message, which the server holds; nothing is read from the region, where the client may
// change what it likes at any time. Thread-safe as the registry is.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/regions/region_registry.h"
#include "server/request/request.h"
#include "server/wire/validate.h"

namespace attend {

// Sets `request.shared`, which keeps the regions, if any of its tensors is shared; `registry` is
// null if the server has shared memory off. UNIMPLEMENTED if so, or if what lies in a GPU's memory
// is to be checked; NOT_FOUND for a token of no region; INVALID_ARGUMENT for a place that is not
// aligned, not within its region, or written to and overlapping another, and for places on two
// GPUs.
Status FindSharedTensors(const v1::AttendRequest& message, const Validated& validated,
                         const RegionRegistry* registry, Request& request);

// Adds their bytes, but for those in a GPU's memory, to what `request` reads and writes. Inputs
// that overlap or nearly touch become one span, which a device takes with one copy; bytes that are
// not a request's own are never written.
void AddSharedSpans(const SharedTensors& shared, Request& request);

}  // namespace attend
