// SPDX-License-Identifier: Apache-2.0

#include "client/call/shared_call.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace attend::client {
namespace {

int64_t BytesOf(const AnswerTensor& tensor) {
  return TensorBytes(NameOf(tensor.name), tensor.dtype, tensor.shape).value();
}

void Detach(HostTensor* tensor) {
  std::shared_ptr<std::byte[]> copy =
      std::make_shared_for_overwrite<std::byte[]>(static_cast<size_t>(tensor->bytes));
  if (tensor->bytes > 0) {
    std::memcpy(copy.get(), tensor->data.get(), static_cast<size_t>(tensor->bytes));
  }
  tensor->data = std::move(copy);
}

}  // namespace

int64_t SharedInputBytes(const AttentionCall& call) {
  int64_t bytes = 0;
  ForTensors(call, [&bytes](v1::TensorName, const TensorRef& tensor) {
    bytes += SharedSpace(tensor.bytes);
  });
  return bytes;
}

int64_t SharedOutputBytes(const AttentionCall& call) {
  int64_t bytes = 0;
  for (const AnswerTensor& each : AnswerTensors(call)) bytes += SharedSpace(BytesOf(each));
  return bytes;
}

Status ShareInputs(const SharedPlace& place, AttentionCall* call) {
  SharedPlace next = place;
  Status status;
  ForTensors(*call, [&](v1::TensorName, TensorRef& tensor) {
    if (DeviceMemory* const device = next.region->device(); device != nullptr) {
      if (status.ok()) status = device->Write(next.offset, tensor.data, tensor.bytes);
      tensor.shared = next;
      next.offset += SharedSpace(tensor.bytes);
      return;
    }
    if (tensor.bytes > 0) std::memcpy(next.data(), tensor.data, static_cast<size_t>(tensor.bytes));
    tensor = TensorRef(tensor.dtype, std::move(tensor.shape), next, tensor.bytes);
    next.offset += SharedSpace(tensor.bytes);
  });
  return status;
}

SharedOutputs ShareOutputs(const SharedPlace& place, const AttentionCall& call) {
  SharedOutputs outputs;
  SharedPlace next = place;
  for (const AnswerTensor& each : AnswerTensors(call)) {
    PlaceOf(outputs, each.name) = next;
    next.offset += SharedSpace(BytesOf(each));
  }
  return outputs;
}

Result<AttentionCall> ShareCall(const MakeRegion& make_region, const AttentionCall& call) {
  const Result<Attention> described = Describe(call, nullptr, nullptr);
  if (!described.ok()) return described.status();  // otherwise its sizes are meaningless
  const int64_t inputs = SharedInputBytes(call);
  Result<std::shared_ptr<SharedRegion>> region =
      make_region(std::max<int64_t>(1, inputs + SharedOutputBytes(call)));
  if (!region.ok()) return region.status();
  AttentionCall shared = call;
  ATTEND_RETURN_IF_ERROR(ShareInputs({*region, 0}, &shared));
  shared.outputs = ShareOutputs({*region, inputs}, shared);
  return shared;
}

Result<AttentionCall> ShareCall(SharedMemory& memory, const AttentionCall& call) {
  return ShareCall([&memory](int64_t bytes) { return memory.Create(bytes); }, call);
}

void DetachTensors(AttentionResult* result) {
  if (!result->gradients) Detach(&result->o);
  if (result->lse) Detach(&*result->lse);
  if (!result->gradients) return;
  GradientTensors& g = *result->gradients;
  for (std::optional<HostTensor>* each : {&g.d_q, &g.d_k, &g.d_v, &g.d_bias, &g.d_sinks}) {
    if (*each) Detach(&**each);
  }
}

}  // namespace attend::client
