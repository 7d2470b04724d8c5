// SPDX-License-Identifier: Apache-2.0
//
// The figures of a load: measurements over load or over time. Pure.

#pragma once

#include <vector>

#include "client/load/load_file.h"
#include "client/plot/chart.h"

namespace attend::client {

// Latency over rate (for one step: over time), throughput, phases, histogram.
Figure LoadFigure(const LoadFile& file);

// Latency over rate, and throughput, of several files in one figure; for two files p99 besides p50.
Figure ComparisonFigure(const std::vector<LoadFile>& files);

// Components of a call's time: their names, and their means in ms, which add up to the call. GPU
// copies and kernels that ran concurrently share that time in proportion.
std::vector<std::string> BarPhases();
std::vector<double> BarParts(const std::array<double, kPhases>& phase_mean_ms);

}  // namespace attend::client
