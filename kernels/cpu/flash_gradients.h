// SPDX-License-Identifier: Apache-2.0
//
// The backward pass on all cores, with the tiles and the SIMD code of cpu_flash. Host memory; any
// thread may call, also several at once.

#pragma once

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// Computes what `gradients` asks for, with the threads of the TBB arena that the caller is in;
// returns when they are done. Takes every pair that passes Check (gradients.h), reads O and LSE as
// the forward pass left them, and writes what it is asked for only. Bits depend on the problem and
// on the instruction set, never on threads.
//
// Scratch memory is about 0.7 MiB for each thread, kept for the next call, and for partial sums the
// larger of 256 MiB and what one KV head takes: 4 (D + Dv) bytes for each key and about 64 MiB
// more, and 24 bytes for each query row if one's LSE is beyond 256. Throws std::bad_alloc if it
// cannot be had; outputs are then unspecified. What comes out NaN or Inf of finite inputs is
// computed again by the reference (reference_gradients.h), one KV head at a time.
//
// Once `stop` is set it ends within milliseconds; outputs are then unspecified.
void CpuFlashGradients(const Attention& attention, const Gradients& gradients,
                       const StopFlag* stop = nullptr);

}  // namespace attend
