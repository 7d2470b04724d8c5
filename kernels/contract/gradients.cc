// SPDX-License-Identifier: Apache-2.0

#include "kernels/contract/gradients.h"

namespace attend {

Status Check(const Attention& a, const Gradients& g) {
  const Problem& p = a.problem;
  ATTEND_RETURN_IF_ERROR(Check(p));
  if (!p.return_lse) return InvalidArgument("lse is missing, the backward pass needs it");
  if (p.page_rows > 0) {
    return Unimplemented("gradients of keys in pages: the pages may belong to several sequences");
  }
  if (g.d_bias.data != nullptr && !p.has_bias) {
    return InvalidArgument("d_bias is requested, but there is no bias");
  }
  if (g.d_bias.data != nullptr && a.bias.dtype == DType::kBit) {
    return InvalidArgument("d_bias is requested, but the bias is a mask of bits");
  }
  if (g.d_sinks != nullptr && !p.has_sinks) {
    return InvalidArgument("d_sinks are requested, but there are no sinks");
  }
  return Status();
}

double BackwardFlops(const Attention& a) {
  const Problem& p = a.problem;
  return 2.0 * static_cast<double>(3 * p.dim + 2 * p.dim_v) * VisiblePairs(a) *
         static_cast<double>(p.heads_q);
}

}  // namespace attend
