// SPDX-License-Identifier: Apache-2.0
//
// The machine's memory bandwidth, for comparison with decoding in bench_cpu.

#pragma once

#include <cstddef>
#include <span>

namespace attend::bench {

// Reads the buffer once with `threads` threads and returns bytes per second. The buffer must be
// larger than the caches.
double MeasureReadRate(std::span<const std::byte> buffer, int threads);

}  // namespace attend::bench
