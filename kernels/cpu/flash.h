// SPDX-License-Identifier: Apache-2.0
//
// Rung 1: exact attention on all cores, tiled with an online softmax and SIMD chosen at run time.
// Takes every problem that passes Check. A row's bits depend on its problem alone: not on threads,
// nor on what else is in the batch. Host memory; any thread may call, also several at once.

#pragma once

#include <span>
#include <string>

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// Computes all attentions of the batch, with the threads of the TBB arena that the caller is in;
// returns when they are done. Throws std::bad_alloc if scratch memory cannot be had (about 0.8 MiB
// per thread, kept for the next call, and for partial answers over splits of keys 2 MiB at most,
// whatever the lengths and heads); outputs are then unspecified. `stops`, if not empty, are the
// attentions' flags, or null: what is stopped is left within milliseconds, its output unspecified,
// and the others have the bits that they have without it.
void CpuFlash(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops = {});

// True if the batch is so small that CpuFlash runs it on the calling thread alone: there is then
// nothing to gain from entering an arena.
bool CpuFlashRunsInline(std::span<const Attention* const> batch);

// The instruction set that runs on this machine, in Highway's words: "AVX3", "AVX2", "NEON"; with
// "_BF16" if scores of bf16 are sums of pairs.
std::string CpuFlashTarget();

}  // namespace attend
