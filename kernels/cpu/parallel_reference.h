// SPDX-License-Identifier: Apache-2.0
//
// cpu_reference on all cores.

#pragma once

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// The whole problem, its rows spread over the threads of the TBB arena that the caller is in; each
// row is computed alone anyway. Host memory; any thread may call. Left soon after `stop` is set.
void ParallelReference(const Attention& attention, const StopFlag* stop = nullptr);

}  // namespace attend
