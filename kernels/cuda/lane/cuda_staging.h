// SPDX-License-Identifier: Apache-2.0
//
// Stagings on a GPU: memory of its pool, filled by copies on one stream of the backend, which has
// the lowest priority. The stream's order is what makes this safe: memory is taken, written and
// given back in it, so that another staging, or a lane, gets the same bytes only behind the copies
// that were still under way.
//
// The host's memory needs more, as its owner is no stream's business: a staging that ends leaves
// its owner to the poller, which lets go of it once the event behind its last copy is reached (or
// the device is lost, and no copy reads any more). Where that is so already, which after a request
// that ran it is, the owner goes at once. Events, marks too, are used again by later stagings, but
// for those not seen to be reached; the memory is taken from the pool for each staging anew.

#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "kernels/contract/backend.h"
#include "kernels/cuda/lane/lane_memory.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/cuda/runtime/event_pool.h"

namespace attend::cuda {

// The copies of all stagings of a device. Any threads at once.
class StagingStream {
 public:
  // Which must outlive it, and which it must outlive in turn as far as what it has given the
  // poller goes: declare it before the poller and behind the pool.
  StagingStream(const DeviceInfo& device, DevicePool& pool) : device_(device), pool_(pool) {}
  ~StagingStream();
  StagingStream(const StagingStream&) = delete;
  StagingStream& operator=(const StagingStream&) = delete;

  // Before anything else. Without pools there is no memory that comes and goes in stream order, and
  // no staging: giving memory back would wait for the whole device.
  Status Open();
  bool can_stage() const { return stream_ != nullptr && pool_.in_stream_order(); }

  Result<std::unique_ptr<Staging>> Make(const HostSpan& host, std::shared_ptr<void> owner,
                                        CompletionPoller& poller);

 private:
  class CudaStaging;

  const DeviceInfo& device_;
  DevicePool& pool_;
  cudaStream_t stream_ = nullptr;
  EventPool events_;
};

}  // namespace attend::cuda
