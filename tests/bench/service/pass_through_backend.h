// SPDX-License-Identifier: Apache-2.0
//
// A device that computes nothing, so that a benchmark measures only the wire and the server. It
// copies the first bytes of Q, K and V to the beginning of O, so that a client can check that its
// tensors arrived. For benchmarks only.

#pragma once

#include <memory>

#include "kernels/contract/backend.h"

namespace attend::bench {

// The pass-through device writes the first kMarkBytes of Q, K and V to O, in this order.
inline constexpr int kMarkBytes = 16;

std::unique_ptr<Backend> MakePassThroughBackend();

}  // namespace attend::bench
