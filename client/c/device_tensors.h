// SPDX-License-Identifier: Apache-2.0
//
// Tensors of a call in GPU memory, and how their bytes reach memory that the server reads. Memory
// from attend_client_allocate is lent already. The caller's own memory is never lent, but copied
// within the GPU: freeing lent memory too early, as caching allocators do, may crash the server,
// and much of it (stream-ordered pools, expandable segments) cannot be lent.

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
  std::map<v1::TensorName, int> ordinals;  // of tensors in GPU memory
  void* stream = nullptr;                  // they are read in its order

  bool any() const { return !ordinals.empty(); }
  // The GPU of q, if every tensor in GPU memory is on it.
  std::optional<int> ordinal() const;
};

// INVALID_ARGUMENT: this process has no such GPU. FAILED_PRECONDITION: it has none at all.
Result<DeviceTensors> DevicesOf(const attend_client_params& params, const AttentionCall& call);

// Enqueues a copy to host memory, complete once FinishCopies has returned.
Status CopyToHost(const DeviceTensors& devices, v1::TensorName name, const TensorRef& tensor,
                  std::byte* to);
// Waits until the enqueued copies are complete.
Status FinishCopies(const DeviceTensors& devices);
// Replaces all tensors in GPU memory by host copies.
Status BringToHost(const DeviceTensors& devices, AttentionCall* call);

using LentRegions = std::vector<std::shared_ptr<SharedRegion>>;
// Makes tensors that are in allocated memory of `pool`, a pool of their GPU, refer to their places.
// Returns the regions.
LentRegions FindLent(const RegionPool& pool, const DeviceTensors& devices, AttentionCall* call);
// Copies all other tensors into a new region of `pool`, and reserves places for the answer in it.
// The server waits on the GPU for the copies and for the work before them on the stream.
Result<std::shared_ptr<SharedRegion>> StageOn(int ordinal, RegionPool& pool,
                                              const DeviceTensors& devices, const LentRegions& lent,
                                              AttentionCall* call);

// An answer in GPU memory.
struct DeviceAnswer {
  int ordinal = 0;
  SharedOutputs outputs;

  // Sets addresses and memory of the answer's tensors.
  void Fill(attend_client_answer* answer) const;
};

// Implements attend_client_used for a region of GPU memory.
Status KeepUntil(SharedRegion& region, void* stream);
// Copies `bytes` of an answer in the order of `stream`. `region`: the GPU region that it is in, or
// null; the region's next user waits for the copy. Complete on return if either side is host
// memory.
Status CopyAnswer(SharedRegion* region, const attend_client_tensor& from, void* to,
                  int32_t to_memory, int64_t bytes, void* stream);

}  // namespace attend::client::c
