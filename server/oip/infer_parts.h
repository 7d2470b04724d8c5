// SPDX-License-Identifier: Apache-2.0
//
// Finds what a ModelInferRequest names: its model, each input's bytes, the places of its outputs.
// Nothing is read from the bytes. Thread-safe, as the regions are.

#pragma once

#include <cstdint>
#include <span>

#include "kernels/util/status.h"
#include "server/oip/infer_state.h"
#include "server/oip/region_names.h"

namespace attend::oip {

// `slices` are the message, of which `state` has the fields and the scan; the rest of it is set.
// `array_bytes`: of what BuildRequest reads number by number, at most kFieldBytesMax. NOT_FOUND:
// the model or a region. INVALID_ARGUMENT names the input or output.
Status FindParts(const RegionNames& regions, int tenant, std::span<const ByteSpan> slices,
                 InferState& state, int64_t& array_bytes);

}  // namespace attend::oip
