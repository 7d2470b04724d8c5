// SPDX-License-Identifier: Apache-2.0
//
// Rung 0 of the backward pass: the definition of the gradients (gradients.h), in plain loops and
// double precision. O and LSE are recomputed, not read, so that the result is a function of Q, K,
// V, dO and dLSE alone, unless the keys are a part of a whole: then O and LSE are the whole's and
// are read. Pure functions of host memory on the calling thread.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// The terms of one query row and one of its keys.
struct KeyGradient {
  int64_t j = 0;
  double weight = 0;   // P
  double kept = 1;     // m of dropout.h
  double d_score = 0;  // dS: with respect to the score
  double d_dot = 0;    // dT * scale: with respect to q.k
};

// Returns the row's keys that have a weight, in ascending order: none for padding rows and rows
// that see no key. `d_sink`, if not null, receives the row's contribution to its head's dSink.
std::vector<KeyGradient> ReferenceKeyGradients(const Attention& attention,
                                               const Gradients& gradients, const RowId& id,
                                               double* d_sink = nullptr,
                                               const StopFlag* stop = nullptr);

// Computes the whole backward pass. Holds dK and dV of one KV head, dQ of one query head, dBias if
// requested, and one row's keys in double. Returns soon after `stop` is set; the output is then
// meaningless.
void CpuReferenceGradients(const Attention& attention, const Gradients& gradients,
                           const StopFlag* stop = nullptr);

}  // namespace attend
