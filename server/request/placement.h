// SPDX-License-Identifier: Apache-2.0
//
// Where and how a request runs, as engine/placement.h decides it. The decision is made once, when
// the request is admitted, and travels with it. It is made again only if a device was lost since.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/select.h"

namespace attend {

// The device of a request whose memory binds it to none.
inline constexpr int kAnyDevice = -1;

// The pass that a request asks for: O, or the gradients.
enum class Pass { kForward, kBackward };

// A device that can run a request, and what the request costs it.
struct Candidate {
  int device = 0;  // index into the engine's devices
  Selection selection;
  double kernel_cost = 0;  // kernels/contract/cost.h
  int64_t cost = 0;        // Batcher::Cost
  bool in_parts = false;   // Backend::RunsInParts
};

struct Placement {
  // The devices that can run the request; one of them is chosen when it is queued. Engine::Admit
  // finds them with their selections, at least one. Engine::Place sets the rest of each and may
  // drop some; if none is left, it refuses the request.
  std::vector<Candidate> candidates;
  // Every candidate can read tensors where their message arrived, and nothing else needs them in
  // the input block.
  bool may_gather = false;
  // Devices that were lost when the candidates were chosen, and when the rest was decided; -1: that
  // has not been done yet.
  int64_t candidates_lost = -1;
  int64_t decided_lost = -1;
};

}  // namespace attend
