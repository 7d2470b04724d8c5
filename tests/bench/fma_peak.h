// SPDX-License-Identifier: Apache-2.0
//
// The machine's peak of fused multiply-adds, with the instruction set of cpu_flash, and of tile
// products, with the loop of cpu_flash_amx, for comparison in bench_cpu.

#pragma once

#include <string>

namespace attend::bench {

// fp32 operations per second of `threads` threads, each with independent chains of fused
// multiply-adds in registers: the best of a few runs of some 20 ms.
double MeasureFmaPeak(int threads);

// The same for bf16 products of tiles in the L1 cache. Requires that WhyNoAmx() is "".
double MeasureTilePeak(int threads);

}  // namespace attend::bench
