// SPDX-License-Identifier: Apache-2.0
//
// Shared by the kernels of the backward pass: a pass, and the terms of each query row, computed
// before its keys are walked.

#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <span>

#include "kernels/contract/gradient_terms.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/portable.h"
#include "kernels/contract/problem.h"
#include "kernels/cuda/ptx/exponent_base.cuh"

namespace attend::cuda {

// Flags and counters between a pass's kernels, all cleared at the start.
struct PassFlags {
  int special;     // set by the row terms: some are not finite
  int measure;     // set by the row terms: some rows must be measured (IsMeasured)
  int doubted;     // set by the row terms: some rows' delta must be measured
  int shifted;     // set by the measuring kernels: some row has a shift
  int redo;        // set by the kernels of 16-bit products: they left non-finite elements
  uint32_t begun;  // works of TurnsSm90 taken, in a launch's first item
  // Fp32Redo: units of looking for tiles, taken and done; tiles found, and of these taken, seen
  // and left to be shared; tiles of rows taken to be measured, and measured.
  uint32_t to_look, looked, found, taken, seen, left, to_measure, measured;
};

// A pass as kernels see it. Terms are indexed by TermIndex; gaps between sequences and after the
// last are 0. A weight is exp(score - shift - lse), with exp and scores in the kernel's units.
struct BackwardPass {
  Attention attention;
  Gradients gradients;
  float* lse = nullptr;     // LSE times lse_unit, minus the shift; Inf for rows without keys
  float lse_unit = kLog2E;  // log2(e): terms are powers of two, of products of Q and K; or 1
  float* less = nullptr;    // delta - dLSE
  float* shift = nullptr;   // the largest score, if fp32 cannot represent LSE well; else 0
  float* doubt = nullptr;
  PassFlags* flags = nullptr;
  // If key blocks take turns at dQ: its sums, and per half of a tile the number of blocks that have
  // added to it, initially 0. Null: no turns.
  float* sums = nullptr;
  uint32_t* turns = nullptr;
  uint32_t first_block = 0;  // the pass's first block within the launch
  int block_bytes_max = 0;   // of shared memory on the device: decides the tiles
};

// Whether a row with this LSE is measured: its weights and P dP are summed again. Within these
// bounds LSE's rounding moves weights by at most 2^-16. If O has 16 bits and scores are far from 0,
// keys have a common part, which multiplies delta's error, from O's rounding, in dQ and dK; other
// scores are seldom below -16 or above 64. Rows of a part of the keys use the whole's O and LSE.
ATTEND_HD inline bool IsMeasured(const Problem& p, float lse) {
  if (HasPart(p)) return false;
  const bool exact = p.o_dtype() == DType::kFloat32;
  return lse < (exact ? -256.0f : -16.0f) ? lse > -INFINITY
                                          : lse > (exact ? 256.0f : 64.0f) && lse < INFINITY;
}
// A measured row has a shift if its LSE, in powers of two, is larger.
inline constexpr double kShiftedLse = 256;
// Whether O's rounding matters. Rows of a part of the keys use the whole's O.
ATTEND_HD inline bool SpoilsDelta(const Problem& p) {
  return p.o_dtype() != DType::kFloat32 && !HasPart(p);
}
// Whether the pass may have rows to measure, wholly or delta alone.
ATTEND_HD inline bool HasMeasured(const BackwardPass& pass) {
  return pass.flags->measure != 0 || (pass.doubt != nullptr && pass.flags->doubted != 0);
}
// How far a sink is above a row's shift, in powers of two; shared, so that all users get the same
// bits.
ATTEND_HD inline double SinkAbove(float sink, double shift) {
  return fma(static_cast<double>(sink), 1.4426950408889634, -shift);
}

// Passes that one kernel can compute: they agree in dtype, D, Dv, in whether their scores have
// terms and dropout, and in which gradients are wanted.
using Passes = std::span<const BackwardPass>;

// Each function enqueues the fewest launches that it can. This one, the first, clears terms, flags
// and counters, and computes the heads' common parts.
cudaError_t LaunchPrepare(Passes passes, cudaStream_t stream);
// After LaunchPrepare: the rows' terms.
cudaError_t LaunchRowTerms(Passes passes, cudaStream_t stream);
// After the terms, for kernels of 16-bit products: the terms of measured rows, by cuda_flash_sm80's
// products, which have the same bits as wgmma's; or, without a cap and dropout, by wgmma.
cudaError_t LaunchSm80Measure(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90Measure(Passes passes, cudaStream_t stream);
// After the terms: dSinks.
cudaError_t LaunchSinkGradients(Passes passes, cudaStream_t stream);
// After the terms: dQ, dK, dV and dBias on CUDA cores, for any problem; measures rows itself.
cudaError_t LaunchFp32Gradients(Passes passes, cudaStream_t stream);
// After kernels of 16-bit products: recomputes the elements they left non-finite. Does nothing for
// a pass without any.
cudaError_t LaunchFp32Repairs(Passes passes, cudaStream_t stream);
// After the terms: dQ, dK and dV by wgmma, for problems that SelectBackward accepts.
cudaError_t LaunchSm90Gradients(Passes passes, cudaStream_t stream);

// After the terms: the same by mma.sync.
cudaError_t LaunchSm80Gradients(Passes passes, cudaStream_t stream);

// Per dtype (sm90_f16.cu, sm90_bf16.cu).
cudaError_t LaunchSm90GradientsF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90GradientsBf16(Passes passes, cudaStream_t stream);
// (sm90_measure_f16.cu, sm90_measure_bf16.cu)
cudaError_t LaunchSm90MeasureF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90MeasureBf16(Passes passes, cudaStream_t stream);
// With dropout (sm90_dropout_f16.cu, sm90_dropout_bf16.cu); called by the above.
cudaError_t LaunchSm90DropoutGradientsF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90DropoutGradientsBf16(Passes passes, cudaStream_t stream);
// Per dtype, for problems without score terms, with them, and with dropout (sm80_plain_f16.cu
// etc.): measures rows, or computes the gradients.
enum class Sm80Task { kMeasure, kGradients };
cudaError_t LaunchSm80PlainF16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80PlainBf16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80GeneralF16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80GeneralBf16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80DropoutF16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80DropoutBf16(Passes passes, Sm80Task task, cudaStream_t stream);

}  // namespace attend::cuda
