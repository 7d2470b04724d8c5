// SPDX-License-Identifier: Apache-2.0
//
// Q, K and V that kernels cannot read 16 bytes at a time: copies in a launch's workspace, which
// the kernels read instead. Zeros fill their rows up to 16-byte boundaries; D stays what it is.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/memory_traits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/runtime/repack_kernel.h"

namespace attend::cuda {

// Tells `Select` where an attention lies: WhyNotTma, and the bytes of copies that help.
MemoryTraits TraitsOf(const Attention& attention);

// Bytes of the copies that the kernel needs; 0 if it needs none, or none would help.
int64_t RepackBytes(KernelId kernel, const Attention& attention);

// Has the attention read copies at `*workspace`, which moves on by RepackBytes, and says how they
// are made.
void Repack(KernelId kernel, Attention* attention, char** workspace,
            std::vector<RepackPiece>* pieces);

}  // namespace attend::cuda
