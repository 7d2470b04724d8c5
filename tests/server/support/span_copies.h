// SPDX-License-Identifier: Apache-2.0
//
// Emulates a GPU's lane in host memory: the input spans are copied to separate memory, the
// attention computes there, and the output spans are copied back whole. Output spans that the
// kernel writes completely are not copied in, and a byte that it misses comes back as part of a
// NaN. Tensors in place stay there.

#pragma once

#include <functional>

#include "kernels/contract/backend.h"

namespace attend::test {

// INTERNAL names a pointer outside all spans of the item, or overlapping spans.
Status ComputeInCopies(const WorkItem& item, const std::function<void(const Attention&)>& compute);

}  // namespace attend::test
