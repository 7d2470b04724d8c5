// SPDX-License-Identifier: Apache-2.0
//
// Finds the tensors of a request that are in regions: of shared memory, or of GPU memory that a
// client lends. Every decision about memory is based on the message, which the server holds;
// nothing is read from the region, which the client may change at any time. Thread-safe, as the
// registry is.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/regions/region_registry.h"
#include "server/request/request.h"
#include "server/wire/validate.h"

namespace attend {

// Sets `request.shared`, which keeps the regions alive, if any of its tensors is shared. `registry`
// is null if the server has shared memory off: then UNIMPLEMENTED, as for a check of tensors in GPU
// memory. NOT_FOUND for an unknown token. INVALID_ARGUMENT for a place that is not aligned, not
// within its region, or written to and overlapping another, and for places on two GPUs.
Status FindSharedTensors(const v1::AttendRequest& message, const Validated& validated,
                         const RegionRegistry* registry, Request& request);

// Adds their bytes, except those in GPU memory, to the spans that `request` reads and writes.
// Inputs that overlap or nearly touch become one span, which a device takes with one copy; bytes
// that are not the request's own are never written.
void AddSharedSpans(const SharedTensors& shared, Request& request);

}  // namespace attend
