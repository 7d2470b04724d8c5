// SPDX-License-Identifier: Apache-2.0
//
// Copies of Q, K and V that kernels cannot read 16 bytes at a time, in a launch's workspace; the
// kernels read those instead. Rows are padded with zeros to 16-byte boundaries; D is unchanged.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/memory_traits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/runtime/repack_kernel.h"

namespace attend::cuda {

// The memory traits of an attention for `Select`: WhyNotTma, and the bytes of copies that would
// help.
MemoryTraits TraitsOf(const Attention& attention);

// Bytes of the copies that the kernel needs; 0 if it needs none, or none would help.
int64_t RepackBytes(KernelId kernel, const Attention& attention);

// Makes the attention read copies at `*workspace`, advances that by RepackBytes, and appends the
// copies to make.
void Repack(KernelId kernel, Attention* attention, char** workspace,
            std::vector<RepackPiece>* pieces);

}  // namespace attend::cuda
