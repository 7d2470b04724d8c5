// SPDX-License-Identifier: Apache-2.0
//
// The parts of a split request as requests of their own, each with just the bytes that it reads and
// writes. Tensors stay where they are; what a part cannot use in its place (LSE where the rows of a
// part are not one run, the offsets of packed sequences) gets a small block of its own.

#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/util/status.h"
#include "server/memory/host_pool.h"
#include "server/request/request.h"
#include "server/split/split_plan.h"

namespace attend {

// One for each piece, in order, without id, device, selection and responder. `whole`'s memory must
// outlive them. RESOURCE_EXHAUSTED: no memory for the small blocks.
Result<std::vector<std::unique_ptr<Request>>> MakeParts(const Request& whole,
                                                        std::span<const QuerySlice> pieces,
                                                        HostPool& pool);

// Brings the part's LSE to its place in the whole's, if it is elsewhere.
void GatherLse(const Request& part, const QuerySlice& piece, const Attention& whole);

}  // namespace attend
