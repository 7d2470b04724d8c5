// SPDX-License-Identifier: Apache-2.0
//
// Rung 1: exact attention on all cores, tiled, with an online softmax and SIMD selected at run
// time. Takes every problem that passes Check. A row's bits depend on its problem alone, not on
// threads or on the rest of the batch. Works on host memory; callable from any thread, also
// concurrently.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// Computes all attentions of the batch on the threads of the caller's TBB arena, and returns when
// they are done. Throws std::bad_alloc if scratch memory cannot be allocated; outputs are then
// unspecified. Scratch is about 0.9 MiB per thread, kept for the next call, and at most 2 MiB for
// partials of splits. `stops`, unless empty, has each attention's stop flag or null. A stopped
// attention ends within milliseconds with its output unspecified; the others' bits are unaffected.
//
// Attentions from index `amx_from` on are computed by cpu_flash_amx, which Select has chosen for
// them: sequences of more than kDecodeRows query rows of a KV head in the tile unit (tile_unit.h),
// and what is decoded of more than kDecodeRowsAlways; others as cpu_flash does.
void CpuFlash(std::span<const Attention* const> batch, std::span<const StopFlag* const> stops = {},
              size_t amx_from = SIZE_MAX);

// Whether the batch is so small that CpuFlash runs it on the calling thread alone, without need of
// an arena.
bool CpuFlashRunsInline(std::span<const Attention* const> batch);

// The instruction set that runs on this machine, by Highway's name ("AVX3", "AVX2", "NEON"), with
// "_BF16" if bf16 scores are sums of pairs.
std::string CpuFlashTarget();

}  // namespace attend
