// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the backward pass share: a pass, and what is known of each query row before
// its keys are walked.

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

// Flags and counters by which a pass's kernels tell each other. All are cleared before.
struct PassFlags {
  int special;        // set by the row terms: some are not finite
  int measure;        // set by the row terms: there are rows to measure (IsMeasured)
  int doubted;        // set by the row terms: there are rows of which delta is to be measured
  int shifted;        // set by what measures them: a row has a shift
  int redo;           // set by kernels of 16-bit products: they left something that is not finite
  uint32_t begun;     // blocks of TurnsSm90
  uint32_t taken;     // units of work of Fp32Redo
  uint32_t measured;  // those of them that have measured rows
};

// What a kernel is told. Where a row's terms are: TermIndex. What is between sequences, and after
// the last, is 0. A weight is exp(score - shift - lse), with exp and scores in the kernel's units.
struct BackwardPass {
  Attention attention;
  Gradients gradients;
  float* lse = nullptr;     // LSE times lse_unit, less the shift; Inf of rows without keys
  float lse_unit = kLog2E;  // log2(e): terms in powers of two, of products of Q and K; or 1
  float* less = nullptr;    // delta - dLSE
  float* shift = nullptr;   // the largest score, of rows whose LSE fp32 does not hold well; else 0
  // 1 of rows whose delta alone is measured, as O's rounding spoils it (common_parts.cuh), else 0.
  // Null: of no row. Behind it, with slack, are the heads' common parts.
  float* doubt = nullptr;
  PassFlags* flags = nullptr;
  // If blocks of keys take turns at dQ: its sums, and how many blocks have added to each half of a
  // tile; the counters are 0 before. Null: they do not.
  float* sums = nullptr;
  uint32_t* turns = nullptr;
  uint32_t first_block = 0;  // of the launch's, the first that is the pass's
};

// Whether a row of this LSE is measured: its weights and P dP are added up again. LSE's rounding
// moves weights by 2^-16 at most up to here. Where O is of 16 bits and scores are far from 0, keys
// have a part in common, by which delta's error, O's rounding, is multiplied in dQ and dK; and
// scores are seldom below -16 or above 64 otherwise. Rows of a part of the keys go by the O and LSE
// of the whole.
ATTEND_HD inline bool IsMeasured(const Problem& p, float lse) {
  if (HasPart(p)) return false;
  const bool exact = p.o_dtype() == DType::kFloat32;
  return lse < (exact ? -256.0f : -16.0f) ? lse > -INFINITY
                                          : lse > (exact ? 256.0f : 64.0f) && lse < INFINITY;
}
// A measured row has a shift if its LSE, in powers of two, is larger.
inline constexpr double kShiftedLse = 256;
// Whether O's rounding is of any weight. Rows of a part of the keys go by the O of the whole.
ATTEND_HD inline bool SpoilsDelta(const Problem& p) {
  return p.o_dtype() != DType::kFloat32 && !HasPart(p);
}
// Whether the pass may have rows to measure, or to measure delta of.
ATTEND_HD inline bool HasMeasured(const BackwardPass& pass) {
  return pass.flags->measure != 0 || (pass.doubt != nullptr && pass.flags->doubted != 0);
}
// How far a sink is above a row's shift, in powers of two: the same number for all that ask.
ATTEND_HD inline double SinkAbove(float sink, double shift) {
  return fma(static_cast<double>(sink), 1.4426950408889634, -shift);
}

// Passes that one kernel can compute: they agree in dtype, D, Dv, in which terms their scores have
// and in which gradients are wanted.
using Passes = std::span<const BackwardPass>;

// Each enqueues the fewest launches that it can. This one clears terms, flags and counters, and
// finds what heads have in common; it needs nothing before it.
cudaError_t LaunchPrepare(Passes passes, cudaStream_t stream);
// After it: the terms.
cudaError_t LaunchRowTerms(Passes passes, cudaStream_t stream);
// After it, for kernels of 16-bit products: the terms of rows to measure, with cuda_flash_sm80's
// products, whose bits wgmma's are; or, without softcap and dropout, with wgmma's.
cudaError_t LaunchSm80Measure(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90Measure(Passes passes, cudaStream_t stream);
// After the terms: dSinks.
cudaError_t LaunchSinkGradients(Passes passes, cudaStream_t stream);
// After it: dQ, dK, dV and dBias on CUDA cores, of any problem, from rows that they measure
// themselves.
cudaError_t LaunchFp32Gradients(Passes passes, cudaStream_t stream);
// After kernels of 16-bit products: computes again what they left not finite. Does nothing for a
// pass that they left finite.
cudaError_t LaunchFp32Repairs(Passes passes, cudaStream_t stream);
// After it: dQ, dK and dV by wgmma. Of problems that SelectBackward has it for.
cudaError_t LaunchSm90Gradients(Passes passes, cudaStream_t stream);

// After it: the same by mma.sync.
cudaError_t LaunchSm80Gradients(Passes passes, cudaStream_t stream);

// For one dtype (sm90_f16.cu, sm90_bf16.cu).
cudaError_t LaunchSm90GradientsF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90GradientsBf16(Passes passes, cudaStream_t stream);
// (sm90_measure_f16.cu, sm90_measure_bf16.cu)
cudaError_t LaunchSm90MeasureF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90MeasureBf16(Passes passes, cudaStream_t stream);
// With dropout (sm90_dropout_f16.cu, sm90_dropout_bf16.cu), called by those.
cudaError_t LaunchSm90DropoutGradientsF16(Passes passes, cudaStream_t stream);
cudaError_t LaunchSm90DropoutGradientsBf16(Passes passes, cudaStream_t stream);
// For one dtype, of problems without score terms, with them, and with dropout (sm80_plain_f16.cu
// and so on): what measures rows, or the gradients.
enum class Sm80Task { kMeasure, kGradients };
cudaError_t LaunchSm80PlainF16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80PlainBf16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80GeneralF16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80GeneralBf16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80DropoutF16(Passes passes, Sm80Task task, cudaStream_t stream);
cudaError_t LaunchSm80DropoutBf16(Passes passes, Sm80Task task, cudaStream_t stream);

}  // namespace attend::cuda
