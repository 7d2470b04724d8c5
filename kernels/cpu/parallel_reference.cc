// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/parallel_reference.h"

#include <cstdint>

#include "kernels/cpu/parallel.h"
#include "kernels/reference/cpu_reference.h"

namespace attend {

void ParallelReference(const Attention& a, const StopFlag* stop) {
  const int64_t heads = a.problem.heads_q;
  for (int64_t b = 0; b < a.problem.batch && !Stopped(stop); ++b) {
    const int64_t rows = SequenceOf(a, b).q_rows;
    ParallelInOrder(
        heads * rows, [&](int64_t n) { StoreReferenceRow(a, b, n / rows, n % rows, stop); }, stop);
  }
}

}  // namespace attend
