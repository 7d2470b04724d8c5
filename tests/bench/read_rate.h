// SPDX-License-Identifier: Apache-2.0
//
// How fast this machine reads memory: the yardstick of bench_cpu's decoding rows.

#pragma once

#include <cstddef>
#include <span>

namespace attend::bench {

// Reads the buffer once with `threads` threads, each a part of it, a few vectors at a time, and
// returns bytes per second. The buffer must be larger than the caches for this to be memory's rate.
double MeasureReadRate(std::span<const std::byte> buffer, int threads);

}  // namespace attend::bench
