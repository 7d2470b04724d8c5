// SPDX-License-Identifier: Apache-2.0
//
// What the machine's multiply-add units can do at most, with the same instruction set as cpu_flash,
// and its tile unit, with the loop of cpu_flash_amx: the yardsticks of bench_cpu.

#pragma once

#include <string>

namespace attend::bench {

// fp32 operations per second of `threads` threads at once, each on independent chains of fused
// multiply-adds in registers: the best of a few runs of some 20 ms.
double MeasureFmaPeak(int threads);

// The same of bf16 products of tiles in the first cache. Only where WhyNoAmx() is "".
double MeasureTilePeak(int threads);

}  // namespace attend::bench
