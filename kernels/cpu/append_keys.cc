// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/append_keys.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace attend {
namespace {

void AppendTo(const Attention& a, const ConstTensorView& pages, const ConstTensorView& rows,
              int64_t count, int64_t dim) {
  const Problem& p = a.problem;
  const int64_t size = DTypeBytes(p.dtype);
  auto* const to = static_cast<char*>(const_cast<void*>(pages.data));
  const auto* const from = static_cast<const char*>(rows.data);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    const int64_t first = s.k_len - count;
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t n = 0; n < count;) {
        // Rows that are contiguous on both sides are copied in runs, others one by one.
        const bool dense = pages.stride_l == dim && rows.stride_l == dim;
        const int64_t run = dense ? EvenKeys(p, first + n, count - n) : 1;
        const int64_t source = b * rows.stride_b + h * rows.stride_h + n * rows.stride_l;
        std::memcpy(to + KeyElement(a, pages, s, b, h, first + n) * size, from + source * size,
                    static_cast<size_t>(run * dim * size));
        n += run;
      }
    }
  }
}

}  // namespace

void AppendKeys(const Attention& a, const KeyAppend& append) {
  AppendTo(a, a.k, append.k, append.rows, a.problem.dim);
  AppendTo(a, a.v, append.v, append.rows, a.problem.dim_v);
}

}  // namespace attend
