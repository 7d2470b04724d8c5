// SPDX-License-Identifier: Apache-2.0

#include "server/wire/validate_backward.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/contract/gradients.h"
#include "server/wire/tensor_rules.h"

namespace attend {
namespace {

// Checks O or dO.
Status CheckRows(const v1::AttendRequest& request, int input, Validated& out) {
  const Problem& p = out.attention.problem;
  const std::string name = kInputNames[static_cast<size_t>(input)];
  const v1::Tensor& tensor = InputOf(request, input);
  const Dims dims = DimsOf(out.layout);
  DType dtype;
  ATTEND_RETURN_IF_ERROR(
      CheckTensor(name, tensor, dims.rank, dims.text_o, dtype, out.tensor_bytes[input]));
  ATTEND_RETURN_IF_ERROR(MustHaveDType(name, dtype, "O's", p.o_dtype()));
  const v1::Tensor& q = request.q();
  if (dims.b >= 0) ATTEND_RETURN_IF_ERROR(MustAgree(name, tensor, dims.b, "B", "q", p.batch));
  ATTEND_RETURN_IF_ERROR(MustAgree(name, tensor, dims.h, "Hq", "q", p.heads_q));
  ATTEND_RETURN_IF_ERROR(
      MustAgree(name, tensor, dims.l, p.packed ? "q rows" : "Lq", "q", q.shape(dims.l)));
  return MustAgree(name, tensor, dims.d, "Dv", "v", p.dim_v);
}

// Checks LSE or dLSE.
Status CheckNumbers(const v1::AttendRequest& request, int input, Validated& out) {
  const Problem& p = out.attention.problem;
  const std::string name = kInputNames[static_cast<size_t>(input)];
  const v1::Tensor& tensor = InputOf(request, input);
  const int rank = p.packed ? 2 : 3;
  DType dtype;
  ATTEND_RETURN_IF_ERROR(CheckTensor(name, tensor, rank, p.packed ? "[Hq, q rows]" : "[B, Hq, Lq]",
                                     dtype, out.tensor_bytes[input]));
  ATTEND_RETURN_IF_ERROR(MustHaveDType(name, dtype, "LSE's", DType::kFloat32));
  if (!p.packed) ATTEND_RETURN_IF_ERROR(MustAgree(name, tensor, 0, "B", "q", p.batch));
  ATTEND_RETURN_IF_ERROR(MustAgree(name, tensor, rank - 2, "Hq", "q", p.heads_q));
  return p.packed ? MustAgree(name, tensor, 1, "q rows", "q", p.total_q)
                  : MustAgree(name, tensor, 2, "Lq", "q", p.len_q);
}

Status Wanted(const v1::BackwardPass& backward, Validated& out) {
  for (const int name : backward.wanted()) {
    if (name < v1::TENSOR_NAME_D_Q || name > v1::TENSOR_NAME_D_SINKS) {
      return WrongEnum("an entry of backward.wanted", name,
                       "D_Q (9), D_K (10), D_V (11), D_BIAS (12) or D_SINKS (13)");
    }
    out.wanted[static_cast<size_t>(Output::kDQ) + static_cast<size_t>(name - v1::TENSOR_NAME_D_Q)] =
        true;
  }
  if (backward.wanted_size() > 0) return Status();
  for (const Output output : {Output::kDQ, Output::kDK, Output::kDV}) out.Want(output);
  return Status();
}

// dQ, dK and dV have the strides of Q, K and V, and dO those of O.
void SetStrides(const Attention& a, Gradients& g) {
  const auto like = [](const auto& from, auto& to) {
    to.stride_b = from.stride_b;
    to.stride_h = from.stride_h;
    to.stride_l = from.stride_l;
  };
  like(a.o, g.d_o);
  like(a.q, g.d_q);
  like(a.k, g.d_k);
  like(a.v, g.d_v);
  g.d_bias.stride_b = a.bias.stride_b;
  g.d_bias.stride_h = a.bias.stride_h;
  g.d_bias.stride_l = a.bias.stride_q;
}

}  // namespace

Status CheckPass(const v1::AttendRequest& request, std::optional<Pass>& asked) {
  const Pass pass = request.has_backward() ? Pass::kBackward : Pass::kForward;
  if (asked.value_or(pass) == pass) {
    asked = pass;
    return Status();
  }
  return InvalidArgument(asked == Pass::kBackward
                             ? "backward is not set, must be set with Backward"
                             : "backward is set, must be unset with Attend: call Backward");
}

Status ValidateBackward(const v1::AttendRequest& request, Validated& out) {
  const v1::BackwardPass& backward = request.backward();
  for (const auto& [name, present] :
       {std::pair{"o", backward.has_o()}, std::pair{"lse", backward.has_lse()},
        std::pair{"d_o", backward.has_d_o()}}) {
    if (present) continue;
    return InvalidArgument("backward." + std::string(name) + " is not set, must be a tensor");
  }
  for (const int input : {kInputO, kInputLse, kInputDO}) out.present[input] = true;
  out.present[kInputDLse] = backward.has_d_lse();
  for (const int input : {kInputO, kInputDO}) {
    ATTEND_RETURN_IF_ERROR(CheckRows(request, input, out));
  }
  for (const int input : {kInputLse, kInputDLse}) {
    if (out.present[input]) ATTEND_RETURN_IF_ERROR(CheckNumbers(request, input, out));
  }
  ATTEND_RETURN_IF_ERROR(Wanted(backward, out));
  out.gradients.emplace();
  SetStrides(out.attention, *out.gradients);
  if (out.attention.problem.has_bias) {
    std::copy_n(request.bias().shape().begin(), out.bias_shape.size(), out.bias_shape.begin());
  }
  Gradients asked;  // only what Check looks at
  float somewhere = 0;
  if (out.wants(Output::kDBias)) asked.d_bias.data = &somewhere;
  if (out.wants(Output::kDSinks)) asked.d_sinks = &somewhere;
  return Check(out.attention, asked);
}

}  // namespace attend
