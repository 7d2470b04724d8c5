// SPDX-License-Identifier: Apache-2.0
//
// A row's weights sum to 1, whatever they are. So over the keys of a KV head dV adds up to what dO
// does over its rows (minus the sinks' shares, times dropout's effect on the weights). This detects
// faults in rows whose individual weights fp32 leaves undetermined. Host memory; calling thread.

#pragma once

#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/stop_flag.h"
#include "kernels/reference/row_weights.h"

namespace attend {

// The element of dV's sum with the largest error relative to its bound: more than 1 is a fault.
struct SumFault {
  double ratio = 0;
  int64_t element = 0;
  double got = 0;
  double want = 0;
};

// Returns no fault if a value is not finite, or a row's sum is unknown: with dropout, if the row
// was not computed whole.
SumFault FindSumFault(const Attention& attention, const Gradients& gradients, int64_t b,
                      int64_t kv_head, bool weights_rounded, GradientRows* rows,
                      const StopFlag* stop = nullptr);

}  // namespace attend
