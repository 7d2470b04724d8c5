// SPDX-License-Identifier: Apache-2.0
//
// Appends new rows of K and V to their pages, in host memory on the calling thread.

#pragma once

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"

namespace attend {

// Writes `append`'s rows to the end of every sequence of `attention`, whose K and V are paged.
void AppendKeys(const Attention& attention, const KeyAppend& append);

}  // namespace attend
