// SPDX-License-Identifier: Apache-2.0
//
// tanh and the cap of scores (ScoreCap) by it. Device code.

#pragma once

#include "kernels/contract/problem.h"
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

// Caps a thread's scores, an array of arrays of float.
template <class Scores>
__device__ __forceinline__ void CapScores(ScoreCap<float> cap, Scores& scores) {
  if (!cap.on()) return;
  const float inverse = 1.0f / cap.value;
  float* const all = reinterpret_cast<float*>(&scores);
#pragma unroll
  for (int n = 0; n < static_cast<int>(sizeof(scores) / sizeof(float)); ++n) {
    all[n] = cap.value * tanhf(all[n] * inverse);
  }
}

// Caps raw products (ScoreUnit): `factor` is CapFactor.
template <int kCount>
__device__ __forceinline__ void CapProducts(float factor, float (&scores)[kCount]) {
#pragma unroll
  for (float& x : scores) x = AccurateTanh(x * factor);
}

}  // namespace attend::cuda
