// SPDX-License-Identifier: Apache-2.0

#include "client/call/shared_call.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace attend::client {
namespace {

template <class Call, class Visit>
void ForTensors(Call& call, const Visit& visit) {
  visit(call.q);
  visit(call.k);
  visit(call.v);
  if (call.bias) visit(*call.bias);
}

int64_t LseBytes(const AttentionCall& call) {
  if (!call.return_lse) return 0;
  return TensorBytes("lse", DType::kFloat32, LseShape(call)).value();
}

}  // namespace

int64_t SharedInputBytes(const AttentionCall& call) {
  int64_t bytes = 0;
  ForTensors(call, [&bytes](const TensorRef& tensor) { bytes += SharedSpace(tensor.bytes); });
  return bytes;
}

int64_t SharedOutputBytes(const AttentionCall& call) {
  return SharedSpace(AnswerBytes(call)) + SharedSpace(LseBytes(call));
}

Status ShareInputs(const SharedPlace& place, AttentionCall* call) {
  SharedPlace next = place;
  Status status;
  ForTensors(*call, [&](TensorRef& tensor) {
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
  outputs.o = place;
  if (call.return_lse) {
    outputs.lse = SharedPlace{place.region, place.offset + SharedSpace(AnswerBytes(call))};
  }
  return outputs;
}

Result<AttentionCall> ShareCall(const MakeRegion& make_region, const AttentionCall& call) {
  const Result<Attention> described = Describe(call, nullptr, nullptr);
  if (!described.ok()) return described.status();  // else its sizes mean nothing
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

}  // namespace attend::client
