// SPDX-License-Identifier: Apache-2.0
//
// Where and how a request runs, as decided by engine/placement.h. The decision is made once, at
// admission, and travels with the request.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/select.h"

namespace attend {

// The device of a request whose memory does not bind it to one.
inline constexpr int kAnyDevice = -1;

// The pass that a request asks for: the output or the gradients.
enum class Pass { kForward, kBackward };

// A device that can run a request, and the cost of running it there.
struct Candidate {
  int device = 0;  // index into the engine's devices
  Selection selection;
  double kernel_cost = 0;  // kernels/contract/cost.h
  int64_t cost = 0;        // Batcher::Cost
  bool in_parts = false;   // Backend::RunsInParts
};

struct Placement {
  // The devices that can run the request; one of them is chosen when it is queued. Engine::Admit
  // finds at least one and its selection. Engine::Place fills in the rest and may drop some; if
  // none is left, it refuses the request.
  std::vector<Candidate> candidates;
  // Every candidate can read tensors where their message arrived, and nothing else needs them in
  // the input block.
  bool may_gather = false;
  bool decided = false;  // by Engine::Place
};

}  // namespace attend
