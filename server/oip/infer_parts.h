// SPDX-License-Identifier: Apache-2.0
//
// Resolves the names in a ModelInferRequest: its model, each input's bytes, its outputs' places.
// Reads none of the tensor bytes. Thread-safe, as the regions are.

#pragma once

#include <cstdint>
#include <span>

#include "kernels/util/status.h"
#include "server/oip/infer_state.h"
#include "server/oip/region_names.h"

namespace attend::oip {

// `slices` are the message; `state` has its fields and its scan, and receives the rest.
// `array_bytes`: total of the inputs that BuildRequest copies number by number, at most
// kFieldBytesMax. NOT_FOUND: the model or a region. INVALID_ARGUMENT names the input or output.
Status FindParts(const RegionNames& regions, int tenant, std::span<const ByteSpan> slices,
                 InferState& state, int64_t& array_bytes);

}  // namespace attend::oip
