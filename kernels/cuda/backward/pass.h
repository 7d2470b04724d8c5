// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the backward pass share: a pass, and what is known of each query row before
// its keys are walked.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/contract/gradient_terms.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/cuda/ptx/exponent_base.cuh"

namespace attend::cuda {

// What a kernel is told. Where a row's terms are: TermIndex. What is between sequences, and after
// the last, is 0.
struct BackwardPass {
  Attention attention;
  Gradients gradients;
  float* lse = nullptr;     // LSE times lse_unit; Inf of rows without keys
  float lse_unit = kLog2E;  // log2(e): LSE in powers of two; or 1
  float* less = nullptr;    // delta - dLSE
  // Set by kernels of 16-bit products that left something that is not finite: it may come from what
  // does not count. Null: no such kernel runs.
  int* redo = nullptr;
  // If blocks of keys take turns at dQ: its sums, how many blocks have added to each half of a
  // tile, and how many have begun; the counters are 0 before. Null: they do not.
  float* sums = nullptr;
  uint32_t* turns = nullptr;
  uint32_t* begun = nullptr;
  uint32_t first_block = 0;  // of the launch's, the first that is the pass's
};

// Passes that one kernel can compute: they agree in dtype, D, Dv, in which terms their scores have
// and in which gradients are wanted.
using Passes = std::span<const BackwardPass>;

// Each enqueues the fewest launches that it can. This one writes the terms, and needs no other but
// that all is 0 before.
cudaError_t LaunchRowTerms(Passes passes, cudaStream_t stream);
// After it: dSinks.
cudaError_t LaunchSinkGradients(Passes passes, cudaStream_t stream);
// After it: dQ, dK, dV and dBias on CUDA cores, of any problem; nothing for a pass whose redo is
// there and not set.
cudaError_t LaunchFp32Gradients(Passes passes, cudaStream_t stream);
// After it: dQ, dK and dV by wgmma. Of problems that SelectBackward has it for.
cudaError_t LaunchSm90Gradients(Passes passes, cudaStream_t stream);

// After it: the same by mma.sync.
cudaError_t LaunchSm80Gradients(Passes passes, cudaStream_t stream);

// For one dtype (sm90_f16.cu, sm90_bf16.cu).
cudaError_t LaunchSm90GradientsF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90GradientsBf16(Passes passes, cudaStream_t stream);
// With dropout (sm90_dropout_f16.cu, sm90_dropout_bf16.cu), called by those.
cudaError_t LaunchSm90DropoutGradientsF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90DropoutGradientsBf16(Passes passes, cudaStream_t stream);
// For one dtype, of problems without score terms, with them, and with dropout (sm80_plain_f16.cu
// and so on).
cudaError_t LaunchSm80PlainF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm80PlainBf16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm80GeneralF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm80GeneralBf16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm80DropoutF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm80DropoutBf16(Passes passes, cudaStream_t stream);

}  // namespace attend::cuda
