// SPDX-License-Identifier: Apache-2.0
//
// Tensors of a call that are in a GPU's memory: which they are, and how their bytes come to where a
// server reads them. What attend_client_allocate gave out is lent already. The caller's own memory
// is never lent itself: whoever frees lent memory too early (an allocator with a cache does) may
// take the server down, and much of it (stream-ordered pools, expandable segments) cannot be lent.
// It is copied within the GPU.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "client/c/attend_client.h"
#include "client/call/attention_call.h"
#include "client/memory/region_pool.h"

namespace attend::client::c {

struct DeviceTensors {
  std::map<v1::TensorName, int> ordinals;  // of those in a GPU's memory
  void* stream = nullptr;                  // in whose order they are read

  bool any() const { return !ordinals.empty(); }
  // The GPU of q and of all that are on one.
  std::optional<int> ordinal() const;
};

// INVALID_ARGUMENT: this process has no such GPU. FAILED_PRECONDITION: it has none at all.
Result<DeviceTensors> DevicesOf(const attend_client_params& params, const AttentionCall& call);

// Copies a tensor to host memory, which it fills once CudaSynchronize has returned.
Status CopyToHost(const DeviceTensors& devices, v1::TensorName name, const TensorRef& tensor,
                  std::byte* to);
// Waits until those copies have been made.
Status FinishCopies(const DeviceTensors& devices);
// Replaces all that are on GPUs by copies on the host.
Status BringToHost(const DeviceTensors& devices, AttentionCall* call);

using LentRegions = std::vector<std::shared_ptr<SharedRegion>>;
// Makes those refer to their places that are in allocated memory of `pool`, which is of their GPU.
// Returns its regions.
LentRegions FindLent(const RegionPool& pool, const DeviceTensors& devices, AttentionCall* call);
// Replaces all others by copies in another region of `pool`, and makes places for the answer in it.
// The server waits on the GPU for the copies and for what comes before them on the stream.
Result<std::shared_ptr<SharedRegion>> StageOn(int ordinal, RegionPool& pool,
                                              const DeviceTensors& devices, const LentRegions& lent,
                                              AttentionCall* call);

// An answer in a GPU's memory.
struct DeviceAnswer {
  int ordinal = 0;
  SharedOutputs outputs;

  // Enters addresses and the GPU.
  void Fill(attend_client_answer* answer) const;
};

// As attend_client_used has it, of a region of a GPU's memory.
Status KeepUntil(SharedRegion& region, void* stream);
// Copies `bytes` of an answer in the order of `stream`. `region`: what it is in, if that is a GPU's
// memory; whoever uses that next waits for the copy. Done on return if either side is the host's.
Status CopyAnswer(SharedRegion* region, const attend_client_tensor& from, void* to,
                  int32_t to_memory, int64_t bytes, void* stream);

}  // namespace attend::client::c
