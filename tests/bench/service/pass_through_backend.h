// SPDX-License-Identifier: Apache-2.0
//
// A device that computes nothing, so that a benchmark sees the wire and the server alone. It
// copies the first bytes of Q, K and V to the front of O, by which a client can tell that its
// tensors arrived. For benchmarks only.

#pragma once

#include <memory>

#include "kernels/contract/backend.h"

namespace attend::bench {

// What the pass-through device writes: Q's, K's and V's first kMarkBytes, one after another.
inline constexpr int kMarkBytes = 16;

std::unique_ptr<Backend> MakePassThroughBackend();

}  // namespace attend::bench
