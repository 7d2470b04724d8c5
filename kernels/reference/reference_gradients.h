// SPDX-License-Identifier: Apache-2.0
//
// Rung 0 of the backward pass: the definition of the gradients (gradients.h), in plain loops and
// double precision. O and LSE are not read but computed anew, so that nothing but Q, K, V, dO and
// dLSE decides. Pure functions of host memory on the calling thread.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"

namespace attend {

// What one query row does to one of its keys.
struct KeyGradient {
  int64_t j = 0;
  double weight = 0;   // P
  double kept = 1;     // m of dropout.h
  double d_score = 0;  // dS
  double d_dot = 0;    // dT * scale: by q.k
};

// The keys of a row that have a weight, in rising order: none for padding rows and rows that see no
// key. `d_sink`, if not null, gets what the row adds to its head's dSink.
std::vector<KeyGradient> ReferenceKeyGradients(const Attention& attention,
                                               const Gradients& gradients, const RowId& id,
                                               double* d_sink = nullptr,
                                               const StopFlag* stop = nullptr);

// The whole backward pass. Holds dK and dV of one KV head, dBias if wanted, and one row's keys in
// double. Left soon after `stop` is set; what was written then means nothing.
void CpuReferenceGradients(const Attention& attention, const Gradients& gradients,
                           const StopFlag* stop = nullptr);

}  // namespace attend
