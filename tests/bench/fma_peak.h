// SPDX-License-Identifier: Apache-2.0
//
// What the machine's multiply-add units can do at most, with the same instruction set as cpu_flash:
// the yardstick of bench_cpu.

#pragma once

#include <string>

namespace attend::bench {

// fp32 operations per second of `threads` threads at once, each on independent chains of fused
// multiply-adds in registers: the best of a few runs of some 20 ms.
double MeasureFmaPeak(int threads);

}  // namespace attend::bench
