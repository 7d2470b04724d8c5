// SPDX-License-Identifier: Apache-2.0
//
// New rows of K and V go to their pages. Host memory, calling thread.

#pragma once

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"

namespace attend {

// Writes `append`'s rows to the end of every sequence of `attention`, whose K and V are in pages.
void AppendKeys(const Attention& attention, const KeyAppend& append);

}  // namespace attend
