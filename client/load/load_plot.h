// SPDX-License-Identifier: Apache-2.0
//
// The pictures of a load: what was measured, over load or over time. Pure.

#pragma once

#include <vector>

#include "client/load/load_file.h"
#include "client/plot/chart.h"

namespace attend::client {

// Latency against rate (of one step: over time), throughput, phases, histogram.
Figure LoadFigure(const LoadFile& file);

// Latency against rate and throughput of several files, in one figure; of two the p99 as well as
// the p50.
Figure ComparisonFigure(const std::vector<LoadFile>& files);

// What a call's time is made of: the names of its parts, and their means in ms, which add up to the
// call. Copies and kernels of a GPU that ran at the same time share that time in proportion.
std::vector<std::string> BarPhases();
std::vector<double> BarParts(const std::array<double, kPhases>& phase_mean_ms);

}  // namespace attend::client
