// SPDX-License-Identifier: Apache-2.0
//
// A request read from disk as a call: the reverse of the encoder in message_codec.cc, for replay.

#include "client/wire/message_codec.h"

#include <utility>
#include <vector>

namespace attend::client {
namespace {

const v1::Tensor& MetaOf(const v1::AttendRequest& request, v1::TensorName name) {
  const v1::BackwardPass& backward = request.backward();
  const v1::Tensor* const tensors[] = {&request.q(),    &request.k(),     &request.v(),
                                       &request.bias(), &backward.o(),    &backward.lse(),
                                       &backward.d_o(), &backward.d_lse()};
  static_assert(v1::TENSOR_NAME_Q == 1 && v1::TENSOR_NAME_D_LSE == std::size(tensors));
  return *tensors[name - v1::TENSOR_NAME_Q];
}

Result<TensorRef> RefOf(v1::TensorName tensor, int raw_index,
                        const std::shared_ptr<const v1::AttendRequest>& request) {
  const v1::Tensor& meta = MetaOf(*request, tensor);
  const std::string name = NameOf(tensor);
  const bool is_bias = tensor == v1::TENSOR_NAME_BIAS;
  const bool mask = meta.dtype() == v1::DTYPE_BIT && is_bias;
  if (!IsDType(meta.dtype()) && !mask) {
    return InvalidArgument(name + ": dtype is " + std::to_string(meta.dtype()) +
                           ", must be 1 (float16), 2 (bfloat16) or 3 (float32)" +
                           (is_bias ? ", or 4 (bit)" : ""));
  }
  if (raw_index >= request->raw_size()) {
    return InvalidArgument(name + ": raw has " + std::to_string(request->raw_size()) +
                           " entries, none for this tensor");
  }
  const std::string& bytes = request->raw(raw_index);
  TensorRef ref(static_cast<DType>(meta.dtype()), {meta.shape().begin(), meta.shape().end()},
                bytes.data(), std::ssize(bytes));
  ref.owner = request;
  return ref;
}

}  // namespace

Result<AttentionCall> CallFromRequest(std::shared_ptr<const v1::AttendRequest> request) {
  const v1::AttendRequest& m = *request;
  AttentionCall call;
  TakeOptions(m, &call);
  if (m.has_bias()) call.bias.emplace();
  if (m.backward().has_d_lse()) call.backward->d_lse.emplace();
  int raw_index = 0;
  Status status;
  ForTensors(call, [&](v1::TensorName name, TensorRef& tensor) {
    if (!status.ok()) return;
    Result<TensorRef> ref = RefOf(name, raw_index++, request);
    status = ref.status();
    if (ref.ok()) tensor = std::move(*ref);
  });
  if (!status.ok()) return status;
  if (m.tree().empty()) return call;
  const int64_t tokens = m.tree_tokens();
  const Result<int64_t> one = TensorBytes("tree", DType::kBit, {1, tokens, tokens});
  if (!one.ok()) return one.status();
  const auto bytes = std::ssize(m.tree());
  call.tree.emplace(DType::kBit, std::vector<int64_t>{*one == 0 ? 0 : bytes / *one, tokens, tokens},
                    m.tree().data(), bytes);
  call.tree->owner = request;
  return call;
}

}  // namespace attend::client
