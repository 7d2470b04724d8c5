// SPDX-License-Identifier: Apache-2.0

#include "client/call/backward_call.h"

#include <cassert>
#include <string>

namespace attend::client {
namespace {

// A view of the same memory, without ownership.
HostTensor Borrowed(const TensorRef& tensor) {
  auto* const data = static_cast<std::byte*>(const_cast<void*>(tensor.data));
  return {tensor.dtype, tensor.shape, std::shared_ptr<std::byte[]>(std::shared_ptr<void>(), data),
          tensor.bytes};
}

Status MustBeLike(const char* name, const TensorRef& tensor, const TensorRef& like) {
  if (tensor.dtype == like.dtype && tensor.shape == like.shape) return Status();
  return InvalidArgument(std::string(name) + ": " + std::string(DTypeName(tensor.dtype)) + " " +
                         ShapeText(tensor.shape) + ", must be " +
                         std::string(DTypeName(like.dtype)) + " " + ShapeText(like.shape));
}

// Sets the view if the answer has the tensor; its strides are those of `like`.
template <class View>
void SetView(const AttentionResult& result, v1::TensorName name, const View& like,
             TensorView& view) {
  const HostTensor* const tensor = TensorOf(result, name);
  if (tensor == nullptr) return;
  view = {tensor->data.get(), like.stride_b, like.stride_h, like.stride_l};
}

}  // namespace

Result<DescribedBackward> DescribeBackward(const AttentionCall& call,
                                           const AttentionResult& result) {
  assert(call.backward && "it asks for no gradients");
  const BackwardCall& backward = *call.backward;
  const HostTensor o = Borrowed(backward.o);
  const HostTensor lse = Borrowed(backward.lse);
  Result<Attention> attention = Describe(call, &o, &lse);
  if (!attention.ok()) return attention.status();
  ATTEND_RETURN_IF_ERROR(MustBeLike("d_o", backward.d_o, backward.o));
  if (backward.d_lse) {
    ATTEND_RETURN_IF_ERROR(MustBeLike("d_lse", *backward.d_lse, backward.lse));
  }
  for (const AnswerTensor& each : AnswerTensors(call)) {
    const HostTensor* const tensor = TensorOf(result, each.name);
    if (tensor == nullptr || tensor->shape != each.shape || tensor->dtype != each.dtype) {
      return Internal("the answer's " + std::string(NameOf(each.name)) +
                      " does not have the requested shape and dtype");
    }
  }
  const Attention& a = *attention;
  Gradients g;
  g.d_o = {backward.d_o.data, a.o.stride_b, a.o.stride_h, a.o.stride_l};
  if (backward.d_lse) g.d_lse = static_cast<const float*>(backward.d_lse->data);
  SetView(result, v1::TENSOR_NAME_D_Q, a.q, g.d_q);
  SetView(result, v1::TENSOR_NAME_D_K, a.k, g.d_k);
  SetView(result, v1::TENSOR_NAME_D_V, a.v, g.d_v);
  const TensorView bias = {nullptr, a.bias.stride_b, a.bias.stride_h, a.bias.stride_q};
  SetView(result, v1::TENSOR_NAME_D_BIAS, bias, g.d_bias);
  if (const HostTensor* const sinks = TensorOf(result, v1::TENSOR_NAME_D_SINKS)) {
    g.d_sinks = reinterpret_cast<float*>(sinks->data.get());
  }
  return DescribedBackward{a, g};
}

}  // namespace attend::client
