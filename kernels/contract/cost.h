// SPDX-License-Identifier: Apache-2.0
//
// Estimates the device time of an attention by kernel: the server bounds, batches, routes and
// shares by it. FLOPs (problem.h) count operations; cost says how long they take. The unit is one
// FLOP at the speed of the device's fast kernel, cpu_flash or cuda_flash_sm90, so that 2 * (D + Dv)
// per pair is the minimum, but for cpu_flash_amx, which is faster.
//
// Model: per pair, D + Dv plus a constant for the softmax, the mask and each score term; for
// cpu_flash also rounding up to whole vectors of rows, tiles, packing of K and V, and keys beyond a
// mask's edge that a tile computes anyway; and per kernel a factor by which it is slower than the
// fast one. README.md beside this file says where the constants come from.

#pragma once

#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"

namespace attend {

// Host memory only (reads the length arrays). Finite, and at least Flops for every kernel that is
// no faster than the fast one.
double Cost(const Attention& attention, KernelId kernel);

// Cost of the backward pass (gradients.h): the forward cost, scaled by the ratio of their matrix
// products.
double BackwardCost(const Attention& attention, KernelId kernel);

// Cost per second of a device kept fully busy. A model; within a factor of two on the machines it
// was compared with.
double CostPerSecond(const DeviceInfo& device);

}  // namespace attend
