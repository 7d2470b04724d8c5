// SPDX-License-Identifier: Apache-2.0
//
// What an attention costs its device, by the kernel that computes it: what the server bounds,
// batches, routes and divides fairly. FLOPs (problem.h) say what was computed; cost says how long
// that takes. Its unit is a FLOP as the fast kernel of the device's kind does it, cpu_flash or
// cuda_flash_sm90, so that 2 * (D + Dv) per pair is the least that a pair costs.
//
// The model: per pair D + Dv and a constant for what the softmax, the mask and the score terms do
// beside the products; for cpu_flash also whole vectors of rows, tiles and the packing of K and V,
// and the keys beside a mask's edge that a tile computes all the same; and for each kernel how much
// slower than the fast one it is. README.md beside this file says where the constants come from.

#pragma once

#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"

namespace attend {

// Host memory only (reads the length arrays). Finite, and at least Flops for every kernel that
// computes them no faster than the fast one.
double Cost(const Attention& attention, KernelId kernel);

// The same for the backward pass (gradients.h): the forward's, times as many as the products of
// the backward pass are more.
double BackwardCost(const Attention& attention, KernelId kernel);

// Cost that the device computes per second with requests that keep all of it busy. A model, within
// a factor of two on the machines it was compared with.
double CostPerSecond(const DeviceInfo& device);

}  // namespace attend
