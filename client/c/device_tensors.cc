// SPDX-License-Identifier: Apache-2.0

#include "client/c/device_tensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/c/params.h"
#include "client/call/shared_call.h"
#include "client/memory/cuda_memory.h"

namespace attend::client::c {
namespace {

const attend_client_tensor& ParamOf(const attend_client_params& params, v1::TensorName name) {
  using Params = attend_client_params;
  constexpr std::array kInputs = {&Params::q, &Params::k,   &Params::v,   &Params::bias,
                                  &Params::o, &Params::lse, &Params::d_o, &Params::d_lse};
  static_assert(v1::TENSOR_NAME_Q == 1 && v1::TENSOR_NAME_D_LSE == kInputs.size());
  return params.*kInputs.at(static_cast<size_t>(name) - 1);
}

// Regions of a GPU's pool are CudaMemory only.
CudaMemory& MemoryOf(const SharedRegion& region) {
  return static_cast<CudaMemory&>(*region.device());
}

}  // namespace

std::optional<int> DeviceTensors::ordinal() const {
  const auto q = ordinals.find(v1::TENSOR_NAME_Q);
  if (q == ordinals.end()) return std::nullopt;
  for (const auto& [name, ordinal] : ordinals) {
    if (ordinal != q->second) return std::nullopt;
  }
  return q->second;
}

Result<DeviceTensors> DevicesOf(const attend_client_params& params, const AttentionCall& call) {
  DeviceTensors devices;
  devices.stream = params.stream;
  Status status;
  ForTensors(call, [&](v1::TensorName name, const TensorRef& tensor) {
    const attend_client_tensor& given = ParamOf(params, name);
    if (given.dtype == 0 || given.memory == 0 || !status.ok()) return;
    if (const Result<std::string> known = CudaUuid(given.memory - 1); !known.ok()) {
      status = Status(known.status().code(), std::string(NameOf(name)) + ".memory is " +
                                                 std::to_string(given.memory) + ": " +
                                                 known.status().message());
      return;
    }
    if (tensor.bytes > 0 || name == v1::TENSOR_NAME_Q) devices.ordinals[name] = given.memory - 1;
  });
  if (!status.ok()) return status;
  return devices;
}

Status CopyToHost(const DeviceTensors& devices, v1::TensorName name, const TensorRef& tensor,
                  std::byte* to) {
  return CudaCopy(devices.ordinals.at(name), to, tensor.data, tensor.bytes, devices.stream);
}

Status FinishCopies(const DeviceTensors& devices) {
  std::set<int> ordinals;
  for (const auto& [name, ordinal] : devices.ordinals) ordinals.insert(ordinal);
  for (const int ordinal : ordinals) {
    ATTEND_RETURN_IF_ERROR(CudaSynchronize(ordinal, devices.stream));
  }
  return Status();
}

Status BringToHost(const DeviceTensors& devices, AttentionCall* call) {
  Status status;
  ForTensors(*call, [&](v1::TensorName name, TensorRef& tensor) {
    if (!status.ok() || !devices.ordinals.contains(name)) return;
    const Result<HostTensor> copy = HostTensor::Make(NameOf(name), tensor.dtype, tensor.shape);
    status = copy.ok() ? CopyToHost(devices, name, tensor, copy->data.get()) : copy.status();
    if (status.ok()) tensor = *copy;
  });
  // Even after a failure: enqueued copies still write to memory that is freed next.
  const Status finished = FinishCopies(devices);
  return status.ok() ? finished : status;
}

LentRegions FindLent(const RegionPool& pool, const DeviceTensors& devices, AttentionCall* call) {
  LentRegions lent;
  ForTensors(*call, [&](v1::TensorName name, TensorRef& tensor) {
    if (tensor.bytes == 0 || !devices.ordinals.contains(name)) return;
    const std::optional<SharedPlace> place = pool.Find(tensor.data, tensor.bytes);
    if (!place) return;
    tensor = TensorRef(tensor.dtype, std::move(tensor.shape), *place, tensor.bytes);
    if (std::find(lent.begin(), lent.end(), place->region) == lent.end()) {
      lent.push_back(place->region);
    }
  });
  return lent;
}

Result<std::shared_ptr<SharedRegion>> StageOn(int ordinal, RegionPool& pool,
                                              const DeviceTensors& devices, const LentRegions& lent,
                                              AttentionCall* call) {
  if (const Result<Attention> described = Describe(*call, nullptr, nullptr); !described.ok()) {
    return described.status();  // else sizes are meaningless; the server says what is wrong
  }
  int64_t inputs = 0;
  ForTensors(*call, [&inputs](v1::TensorName, const TensorRef& tensor) {
    if (tensor.shared.region == nullptr) inputs += SharedSpace(tensor.bytes);
  });
  Result<std::shared_ptr<SharedRegion>> region =
      pool.Take(std::max<int64_t>(1, inputs + SharedOutputBytes(*call)));
  if (!region.ok()) return region;
  for (const std::shared_ptr<SharedRegion>& each : lent) {
    ATTEND_RETURN_IF_ERROR(MemoryOf(*each).Join(devices.stream));
  }
  call->outputs = ShareOutputs({*region, inputs}, *call);
  if (inputs == 0) return region;
  CudaMemory& memory = MemoryOf(**region);
  ATTEND_RETURN_IF_ERROR(memory.Await(devices.stream));
  SharedPlace next{*region, 0};
  Status status;
  bool from_host = false;
  ForTensors(*call, [&](v1::TensorName name, TensorRef& tensor) {
    if (!status.ok() || tensor.shared.region != nullptr) return;
    from_host = from_host || !devices.ordinals.contains(name);
    status = CudaCopy(ordinal, next.data(), tensor.data, tensor.bytes, devices.stream);
    tensor = TensorRef(tensor.dtype, std::move(tensor.shape), next, tensor.bytes);
    next.offset += SharedSpace(tensor.bytes);
  });
  ATTEND_RETURN_IF_ERROR(status);
  ATTEND_RETURN_IF_ERROR(memory.Record(devices.stream));
  // Host memory is the caller's again as soon as the call has ended, even by a failure.
  if (from_host) ATTEND_RETURN_IF_ERROR(CudaSynchronize(ordinal, devices.stream));
  return region;
}

void DeviceAnswer::Fill(attend_client_answer* answer) const {
  for (const auto& [name, field] : kAnswerFields) {
    attend_client_tensor& tensor = answer->*field;
    const std::optional<SharedPlace>& place = PlaceOf(outputs, name);
    if (tensor.dtype == 0 || !place) continue;
    tensor.data = place->data();
    tensor.memory = ordinal + 1;
  }
}

Status KeepUntil(SharedRegion& region, void* stream) { return MemoryOf(region).Join(stream); }

Status CopyAnswer(SharedRegion* region, const attend_client_tensor& from, void* to,
                  int32_t to_memory, int64_t bytes, void* stream) {
  if (from.memory == 0 && to_memory == 0) {
    if (bytes > 0) std::memcpy(to, from.data, static_cast<size_t>(bytes));
    return Status();
  }
  if (from.memory != 0 && to_memory != 0 && from.memory != to_memory) {
    return InvalidArgument("to_memory is " + std::to_string(to_memory) + ", must be 0 or " +
                           std::to_string(from.memory) + ", the answer's");
  }
  const int ordinal = std::max(from.memory, to_memory) - 1;
  ATTEND_RETURN_IF_ERROR(CudaCopy(ordinal, to, from.data, bytes, stream));
  if (from.memory == 0 || to_memory == 0) return CudaSynchronize(ordinal, stream);
  return region == nullptr ? Status() : KeepUntil(*region, stream);
}

}  // namespace attend::client::c
