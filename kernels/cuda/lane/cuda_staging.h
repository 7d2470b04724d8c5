// SPDX-License-Identifier: Apache-2.0
//
// Stagings on a GPU: memory from its pool, filled by copies on one stream of the backend, which has
// the lowest priority. The stream's order makes this safe: memory is taken, written and given back
// in that order, so another staging, or a lane, gets the same bytes only after the copies that were
// still running.
//
// The host memory needs more, because the stream does not control its owner. A staging that ends
// passes the owner to the poller, which releases it when the event after the last copy is reached,
// or when the device is lost and no copy reads any more. If the event is already reached, as it is
// after a request that ran, the owner is released at once. Later stagings reuse events, except
// those not seen to be reached. Each staging takes its memory from the pool.

#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "kernels/contract/backend.h"
#include "kernels/cuda/lane/lane_memory.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/cuda/runtime/event_pool.h"

namespace attend::cuda {

// The copies of all stagings of a device. Thread-safe.
class StagingStream {
 public:
  // `device` and `pool` must outlive it. It must outlive the poller, which may hold some of its
  // events: declare it after the pool and before the poller.
  StagingStream(const DeviceInfo& device, DevicePool& pool) : device_(device), pool_(pool) {}
  ~StagingStream();
  StagingStream(const StagingStream&) = delete;
  StagingStream& operator=(const StagingStream&) = delete;

  // Call first. Without pools memory cannot be allocated and freed in stream order, and there is no
  // staging: freeing memory would wait for the whole device.
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
