// SPDX-License-Identifier: Apache-2.0
//
// The backward pass on all cores, with the tiles and SIMD code of cpu_flash. Works on host memory;
// callable from any thread, also concurrently.

#pragma once

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// Computes the gradients that `gradients` asks for on the threads of the caller's TBB arena, and
// returns when they are done. Takes every pair that passes Check (gradients.h), reads O and LSE as
// the forward pass left them, and writes only the gradients asked for. Bits depend on the problem
// and the instruction set, never on threads.
//
// Scratch memory is about 0.6 MiB per thread, kept for the next call. Partial sums take the larger
// of 256 MiB and the need of one KV head: 4 (D + Dv) bytes per key and about 64 MiB, plus 24 bytes
// per query row if some row's LSE is beyond 256. Throws std::bad_alloc if it cannot be allocated;
// outputs are then unspecified. A KV head with finite inputs but NaN or Inf among its gradients is
// computed again by the reference (reference_gradients.h).
//
// Once `stop` is set it returns within milliseconds; outputs are then unspecified.
void CpuFlashGradients(const Attention& attention, const Gradients& gradients,
                       const StopFlag* stop = nullptr);

// The same as cpu_flash_amx: sequences with more rows than are decoded have their products in AMX
// tiles (flash_gradients_amx-inl.h). Q and O are bf16, |scale| is at most kFlushedScaleMax, and
// there is a tile unit (tile_unit.h) and AVX512_BF16. Scratch is about 1 MiB per thread.
void CpuFlashAmxGradients(const Attention& attention, const Gradients& gradients,
                          const StopFlag* stop = nullptr);

}  // namespace attend
