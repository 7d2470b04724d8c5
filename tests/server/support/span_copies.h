// SPDX-License-Identifier: Apache-2.0
//
// What a GPU's lane does with an item, in host memory: the input spans are copied to memory of its
// own, the attention computes there, and the output spans come back whole. Where the kernel writes
// every byte of them nothing is brought in first, and a byte that it forgot comes back as NaN's.
// Tensors in place stay where they are.

#pragma once

#include <functional>

#include "kernels/contract/backend.h"

namespace attend::test {

// INTERNAL names a pointer that lies in none of the item's spans, or spans that overlap.
Status ComputeInCopies(const WorkItem& item, const std::function<void(const Attention&)>& compute);

}  // namespace attend::test
