// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the backward pass share: one item, and what is known of each query row before
// its keys are walked.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"

namespace attend::cuda {

// A kernel's parameter. The terms of a sequence's rows begin at multiples of kTermRows and are
// padded to one, with what makes a row count for nothing, so that tiles of them can be loaded.
struct BackwardPass {
  Attention attention;
  Gradients gradients;
  float* lse2 = nullptr;  // LSE in powers of two; Inf of rows that count for nothing
  float* less = nullptr;  // delta - dLSE
  // Set by kernels of 16-bit products that left something that is not finite: it may come from what
  // does not count. Null: no such kernel runs.
  int* redo = nullptr;
};

inline constexpr int kTermRows = 128;

// Terms of one head. Packed sequences may begin anywhere: each has a tile more than it may fill.
ATTEND_HD inline int64_t TermsOfHead(const Problem& p) {
  return p.packed ? (p.total_q / kTermRows + p.batch) * kTermRows
                  : (p.len_q + kTermRows - 1) / kTermRows * kTermRows * p.batch;
}
ATTEND_HD inline int64_t TermIndex(const Problem& p, const Sequence& s, int64_t b, int64_t h,
                                   int64_t i) {
  const int64_t first = p.packed ? (s.q_row / kTermRows + b) * kTermRows
                                 : (p.len_q + kTermRows - 1) / kTermRows * kTermRows * b;
  return h * TermsOfHead(p) + first + i;
}

// Writes the terms, and redo = 0. Needs no other launch.
cudaError_t LaunchRowTerms(const BackwardPass& pass, cudaStream_t stream);
// After it: dSinks.
cudaError_t LaunchSinkGradients(const BackwardPass& pass, cudaStream_t stream);
// After it: dQ, dK, dV and dBias on CUDA cores, of any problem; nothing if pass.redo is there and
// not set.
cudaError_t LaunchFp32Gradients(const BackwardPass& pass, cudaStream_t stream);
// After it: dQ, dK and dV by wgmma. Of problems that SelectBackward has it for.
cudaError_t LaunchSm90Gradients(const BackwardPass& pass, cudaStream_t stream);

// For one dtype (sm90_f16.cu, sm90_bf16.cu).
cudaError_t LaunchSm90GradientsF16(const BackwardPass& pass, cudaStream_t stream);
cudaError_t LaunchSm90GradientsBf16(const BackwardPass& pass, cudaStream_t stream);

}  // namespace attend::cuda
