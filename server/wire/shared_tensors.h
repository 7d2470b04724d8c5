// SPDX-License-Identifier: Apache-2.0
//
// Finds the tensors of a request that are in regions: shared memory, or GPU memory lent by a
// client. Every decision is based on the message, which the server holds; nothing is read from the
// region, which the client may change at any time. Thread-safe, like the registry.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/regions/region_registry.h"
#include "server/request/request.h"
#include "server/wire/validate.h"

namespace attend {

// Sets the shared tensors of `request.source`, which keep the regions alive, if there are any.
// UNIMPLEMENTED: `registry` is null because shared memory is off, or a check is requested of
// tensors in GPU memory. NOT_FOUND: unknown token. INVALID_ARGUMENT: a place that is misaligned,
// outside its region, or an output overlapping another place; or places on two GPUs.
Status FindSharedTensors(const v1::AttendRequest& message, const Validated& validated,
                         const RegionRegistry* registry, Request& request);

// Adds their bytes, except those in GPU memory, to the spans that `request` reads and writes.
// Inputs that overlap or nearly touch are merged into one span, so that a device copies them at
// once. Bytes outside the request's outputs are never written.
void AddSharedSpans(const SharedTensors& shared, Request& request);

}  // namespace attend
