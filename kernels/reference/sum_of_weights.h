// SPDX-License-Identifier: Apache-2.0
//
// A row's weights sum to 1, whatever they are. So over the keys of a KV head dV adds up to what dO
// does over its rows (less the sinks' shares, times what dropout makes of the weights), which shows
// faults of rows whose weights themselves fp32 leaves open. Host memory; calling thread.

#pragma once

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/reference/row_weights.h"

namespace attend {

// The element of dV's sum that is off by the most of its bounds: more than 1 is a fault.
struct SumFault {
  double ratio = 0;
  int64_t element = 0;
  double got = 0;
  double want = 0;
};

// Nothing is found where something is not finite, nor where a row's sum is not known: with dropout,
// where the row was not computed whole.
SumFault FindSumFault(const Attention& attention, const Gradients& gradients, int64_t b,
                      int64_t kv_head, bool weights_rounded, GradientRows* rows,
                      const StopFlag* stop = nullptr);

}  // namespace attend
