// SPDX-License-Identifier: Apache-2.0
//
// Runs one backward pass on the GPU, in each way that there is.

#pragma once

#include <string>

#include "kernels/contract/gradients.h"
#include "kernels/contract/select.h"
#include "kernels/util/status.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

// A kernel, and whether there is room for blocks to take turns at dQ.
struct Way {
  KernelId kernel;
  bool room_for_turns = true;
};
inline constexpr Way kWays[] = {{KernelId::kCudaFlashFp32},
                                {KernelId::kCudaFlashSm80},
                                {KernelId::kCudaFlashSm90},
                                {KernelId::kCudaFlashSm90, false}};

std::string NameOf(const Way& way);

// Whether this machine's GPU computes it so. Of a problem that no blocks take turns at, only with
// room for them: without, it is the same.
bool Takes(const Way& way, const Attention& attention, const Gradients& gradients);

// O and LSE are those of `owned`; the gradients come back to `gradients`.
Status RunBackward(OwnedAttention* owned, OwnedGradients* gradients, const Way& way);

}  // namespace attend::test
