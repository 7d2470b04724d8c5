// SPDX-License-Identifier: Apache-2.0
//
// Places are validated from the message alone: token, alignment, bounds, overlap, device. Overlap
// is checked for outputs only, against all inputs and earlier outputs; inputs may overlap each
// other. Input spans are merged by a sweep in address order within each region.

#include "server/wire/shared_tensors.h"
#include "server/memory/range_allocator.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace attend {
namespace {

std::string RangeText(const RegionPlace& place) {
  return "[" + std::to_string(place.offset) + ", " + std::to_string(place.offset + place.bytes) +
         ")";
}

bool Overlap(const RegionPlace& a, const RegionPlace& b) {
  if (a.region == nullptr || b.region == nullptr || a.bytes == 0 || b.bytes == 0) return false;
  if (a.region->device != b.region->device) return false;
  // By address, because memory lent twice is two regions.
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data());
  const auto begin_b = reinterpret_cast<uintptr_t>(b.data());
  return begin_a < begin_b + static_cast<uintptr_t>(b.bytes) &&
         begin_b < begin_a + static_cast<uintptr_t>(a.bytes);
}

// `field` names the place in the message.
Status Find(const RegionRegistry& registry, int tenant, const std::string& field,
            const v1::SharedMemory& where, int64_t bytes, RegionPlace& place) {
  if (where.region().size() != kTokenBytes) {
    return InvalidArgument(field + ".region has " + std::to_string(where.region().size()) +
                           " bytes, must have " + std::to_string(kTokenBytes));
  }
  const uint64_t offset = where.offset();
  if (offset % kTensorAlignBytes != 0) {
    return InvalidArgument(field + ".offset is " + std::to_string(offset) +
                           ", must be a multiple of " + std::to_string(kTensorAlignBytes));
  }
  RegionRef region = registry.Find(where.region(), tenant);
  if (region == nullptr) {
    return Status(Code::kNotFound,
                  field + ".region names no region: it was released, or its connection has ended");
  }
  if (bytes > region->bytes || offset > static_cast<uint64_t>(region->bytes - bytes)) {
    return InvalidArgument(field + ".offset is " + std::to_string(offset) + ", with " +
                           std::to_string(bytes) + " bytes it must end within the region's " +
                           std::to_string(region->bytes));
  }
  place.region = std::move(region);
  place.offset = static_cast<int64_t>(offset);
  place.bytes = bytes;
  return Status();
}

// Records a tensor in GPU memory and adds its size to `bytes`. INVALID_ARGUMENT if another tensor
// is on a different GPU.
Status PlaceOnDevice(const char* name, const RegionPlace& place, int64_t& bytes,
                     SharedTensors& shared) {
  const SharedRegion& region = *place.region;
  if (region.device == SharedRegion::kHost) return Status();
  if (shared.device != SharedRegion::kHost && shared.device != region.device) {
    return InvalidArgument(std::string(name) + " is in memory of " + region.imported.device_name +
                           ", other tensors are in that of " + shared.device_name +
                           ": all must be on one GPU");
  }
  shared.device = region.device;
  shared.device_name = region.imported.device_name;
  bytes += place.bytes;
  if (place.bytes > 0) shared.in_place.Add({place.data(), place.bytes});
  const DeviceEvent* const event = region.imported.event.get();
  if (event == nullptr) return Status();
  for (const DeviceEvent*& after : shared.after) {
    if (after == event) break;
    if (after != nullptr) continue;
    after = event;
    break;
  }
  return Status();
}

// An output must not overlap an input or an earlier output.
Status CheckOutput(const std::string& name, int output, const SharedTensors& shared) {
  constexpr std::array<const char*, kOutputsMax> kTitles = {"O",  "LSE",   "dQ",    "dK",
                                                            "dV", "dBias", "dSinks"};
  const RegionPlace& place = shared.outputs[output];
  const auto check = [&](const RegionPlace& other, const char* title) {
    if (!Overlap(place, other)) return Status();
    return InvalidArgument(name + " is " + RangeText(place) + " of its region, must not overlap " +
                           title + "'s " + RangeText(other));
  };
  for (int i = 0; i < kTensorsMax; ++i) {
    ATTEND_RETURN_IF_ERROR(check(shared.inputs[i], kInputNames[i]));
  }
  for (int i = 0; i < output; ++i) {
    ATTEND_RETURN_IF_ERROR(check(shared.outputs[i], kTitles[i]));
  }
  return Status();
}

// Finds the places of the answer.
Status FindOutputs(const v1::AttendRequest& message, const Validated& validated,
                   const RegionRegistry& registry, int tenant, SharedTensors& shared) {
  for (int i = 0; i < kOutputsMax; ++i) {
    if (!validated.output_shared[i]) continue;
    const auto output = static_cast<Output>(i);
    const std::string name = PlacementName(output);
    const int64_t bytes = OutputBytes(validated.attention, output);
    ATTEND_RETURN_IF_ERROR(Find(registry, tenant, name + ".shared_memory",
                                PlacementOf(message, output).shared_memory(), bytes,
                                shared.outputs[i]));
    shared.output_bytes += bytes;
    ATTEND_RETURN_IF_ERROR(
        PlaceOnDevice(name.c_str(), shared.outputs[i], shared.device_output_bytes, shared));
    ATTEND_RETURN_IF_ERROR(CheckOutput(name, i, shared));
  }
  return Status();
}

}  // namespace

Status FindSharedTensors(const v1::AttendRequest& message, const Validated& validated,
                         const RegionRegistry* registry, Request& request) {
  if (!validated.any_shared()) return Status();
  if (registry == nullptr) {
    return Unimplemented("shared memory is off on this server; --shared-memory turns it on");
  }
  auto shared = std::make_unique<SharedTensors>();
  for (int i = 0; i < kTensorsMax; ++i) {
    if (!validated.shared[i]) continue;
    const char* const name = kInputNames[i];
    const int64_t bytes = validated.tensor_bytes[i];
    ATTEND_RETURN_IF_ERROR(Find(*registry, request.tenant, std::string(name) + ".shared_memory",
                                InputOf(message, i).shared_memory(), bytes, shared->inputs[i]));
    ATTEND_RETURN_IF_ERROR(
        PlaceOnDevice(name, shared->inputs[i], shared->device_input_bytes, *shared));
    shared->input_bytes += bytes;  // each is within a region: no overflow
  }
  ATTEND_RETURN_IF_ERROR(FindOutputs(message, validated, *registry, request.tenant, *shared));
  if (shared->device != SharedRegion::kHost && message.check()) {
    return Unimplemented("check is set, and tensors are in memory of " + shared->device_name +
                         ", where this server cannot check them; send them another way to have "
                         "them checked");
  }
  const CacheHold* const cache = request.source.cache();
  if (cache != nullptr && shared->device != SharedRegion::kHost &&
      shared->device != cache->device()) {
    return InvalidArgument(
        "sessions are on another device than the request's tensors, which are in memory of " +
        shared->device_name);
  }
  request.source.SetShared(std::move(shared));
  return Status();
}

void AddSharedSpans(const SharedTensors& shared, Request& request) {
  std::vector<const RegionPlace*> inputs;
  for (const RegionPlace& input : shared.inputs) {
    if (input.bytes > 0 && input.region->device == SharedRegion::kHost) inputs.push_back(&input);
  }
  std::sort(inputs.begin(), inputs.end(),
            [](const auto* a, const auto* b) { return a->data() < b->data(); });
  for (size_t i = 0; i < inputs.size();) {
    const RegionPlace& first = *inputs[i];
    int64_t end = first.offset + first.bytes;
    for (++i; i < inputs.size() && inputs[i]->region == first.region; ++i) {
      if (inputs[i]->offset >= end + kTensorAlignBytes) break;
      end = std::max(end, inputs[i]->offset + inputs[i]->bytes);
    }
    request.input_spans.Add({first.data(), end - first.offset});
  }
  for (const RegionPlace& output : shared.outputs) {
    if (output.bytes == 0 || output.region->device != SharedRegion::kHost) continue;
    request.output_spans.Add({output.data(), output.bytes});
  }
}

}  // namespace attend
