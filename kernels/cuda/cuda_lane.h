// SPDX-License-Identifier: Apache-2.0
//
// A lane on a GPU: one stream, four events around its phases, and device memory that holds a whole
// batch (inputs, outputs, kernel workspace). Submit comes from one thread at a time; what ends a
// batch runs on the poller's thread.

#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/batch_layout.h"
#include "kernels/cuda/completion_poller.h"

namespace attend::cuda {

class CudaLane : public Lane {
 public:
  // `device` and `poller` must outlive the lane.
  static Result<std::unique_ptr<Lane>> Make(const DeviceInfo& device, CompletionPoller& poller,
                                            const LaneOptions& options);
  ~CudaLane() override;  // waits for the batch that runs

  Status Submit(std::span<const WorkItem> items, Done done) override;

 private:
  // In stream order: before copy-in, after copy-in, after the kernels, after copy-out.
  enum Mark { kBegin, kCopiedIn, kComputed, kCopiedOut, kMarks };

  // A batch from Submit to Done.
  struct Batch {
    std::vector<WorkItem> items;
    std::vector<ItemPlace> places;      // of their spans in the lane's memory
    std::vector<Attention> attentions;  // the same on the device
    BatchLayout layout;
    std::vector<Status> statuses;
    Done done;
  };

  CudaLane(const DeviceInfo& device, CompletionPoller& poller) : device_(device), poller_(poller) {}

  Status Open(const LaneOptions& options);
  // Makes the lane's memory at least `bytes`; on failure it is as it was, or smaller.
  Status Reserve(int64_t bytes);
  cudaError_t AllocateMemory(int64_t bytes);
  void FreeMemory();

  Status Prepare(std::span<const WorkItem> items, Batch* batch);
  void CopyIn(Batch* batch);
  void Compute(Batch* batch);
  void CopyOut(Batch* batch);
  // Puts a failure down to its item; true if there was none.
  bool Note(cudaError_t error, const char* where, Status* status);
  void Finish(Batch* batch, cudaError_t error);
  int64_t Elapsed(Mark from, Mark to) const;

  const DeviceInfo& device_;
  CompletionPoller& poller_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[kMarks] = {};
  bool has_pools_ = false;  // stream-ordered allocation: growing does not stop other lanes
  char* memory_ = nullptr;
  int64_t memory_bytes_ = 0;

  std::mutex mutex_;
  std::condition_variable idle_;
  bool busy_ = false;
};

}  // namespace attend::cuda
