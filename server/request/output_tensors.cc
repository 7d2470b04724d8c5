// SPDX-License-Identifier: Apache-2.0

#include "server/request/output_tensors.h"

namespace attend {
namespace {

// Elements of the bias as sent: each broadcast dimension counts as 1.
int64_t ElementsBias(const Attention& a) {
  const Problem& p = a.problem;
  return (a.bias.stride_b != 0 ? p.batch : 1) * (a.bias.stride_h != 0 ? p.heads_q : 1) *
         (a.bias.stride_q != 0 ? p.len_q : 1) * p.len_k;
}

}  // namespace

int64_t OutputBytes(const Attention& a, Output output) {
  constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
  const Problem& p = a.problem;
  const int64_t element = DTypeBytes(p.dtype);
  switch (output) {
    case Output::kO:
      return BytesO(p);
    case Output::kLse:
      return BytesLse(p);
    case Output::kDQ:
      return ElementsQ(p) * element;
    case Output::kDK:
      return ElementsK(p) * element;
    case Output::kDV:
      return ElementsV(p) * element;
    case Output::kDBias:
      return ElementsBias(a) * kFloat;
    case Output::kDSinks:
      return p.heads_q * kFloat;
  }
  return 0;
}

std::array<OutputTensor, kOutputsMax> OutputsOf(const Attention& a,
                                                const std::optional<BackwardPass>& backward,
                                                bool lse_for_check) {
  std::array<OutputTensor, kOutputsMax> outputs;
  const auto set = [&](Output output, bool wanted, const void* data) {
    if (wanted) outputs[static_cast<size_t>(output)] = {true, data, OutputBytes(a, output)};
  };
  if (!backward) {
    set(Output::kO, true, a.o.data);
    set(Output::kLse, a.problem.return_lse && !lse_for_check, a.lse);
    return outputs;
  }
  const Gradients& g = backward->gradients;
  const auto wanted = [&](Output output) { return backward->wanted[static_cast<size_t>(output)]; };
  set(Output::kDQ, wanted(Output::kDQ), g.d_q.data);
  set(Output::kDK, wanted(Output::kDK), g.d_k.data);
  set(Output::kDV, wanted(Output::kDV), g.d_v.data);
  set(Output::kDBias, wanted(Output::kDBias), g.d_bias.data);
  set(Output::kDSinks, wanted(Output::kDSinks), g.d_sinks);
  return outputs;
}

}  // namespace attend
