// SPDX-License-Identifier: Apache-2.0
//
// cpu_reference on all cores.

#pragma once

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// Computes the whole problem, its rows spread over the threads of the caller's TBB arena. Rows are
// independent. Works on host memory; callable from any thread. Returns soon after `stop` is set.
void ParallelReference(const Attention& attention, const StopFlag* stop = nullptr);

}  // namespace attend
