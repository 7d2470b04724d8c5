// SPDX-License-Identifier: Apache-2.0
//
// Makes the parts of a split request: requests of their own, each with only the bytes that it reads
// and writes. Tensors stay where they are. What a part cannot use in place (LSE if the part's rows
// are not contiguous, the offsets of packed sequences) gets a small block of its own.

#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/util/status.h"
#include "server/memory/host_pool.h"
#include "server/request/request.h"
#include "server/split/split_plan.h"

namespace attend {

// Returns one part for each slice, in order, without id, device, selection and responder. `whole`'s
// memory must outlive them. RESOURCE_EXHAUSTED: no memory for the small blocks.
Result<std::vector<std::unique_ptr<Request>>> MakeParts(const Request& whole,
                                                        std::span<const QuerySlice> slices,
                                                        HostPool& pool);

// Copies the part's LSE to its place in the whole's, if it is elsewhere.
void GatherLse(const Request& part, const QuerySlice& slice, const Attention& whole);

}  // namespace attend
