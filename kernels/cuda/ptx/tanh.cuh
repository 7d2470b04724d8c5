// SPDX-License-Identifier: Apache-2.0
//
// tanh, for softcap. Device code.

#pragma once

#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// tanh to a few ulp, where the hardware instruction has 11 bits: a minimax polynomial near 0
// (relative error 4.2e-8), exp2 beyond.
__device__ __forceinline__ float AccurateTanh(float x) {
  const float square = x * x;
  float y = fmaf(square, 0.0162961658f, -0.0526003247f);
  y = fmaf(square, y, 0.133196663f);
  y = fmaf(square, y, -0.33332904f);
  const float near = fmaf(x * square, y, x);
  const float far = 1.0f - __fdividef(2.0f, 1.0f + FastExp2(2.0f * kLog2E * x));
  return fabsf(x) < 0.55f ? near : far;
}

}  // namespace attend::cuda
