// SPDX-License-Identifier: Apache-2.0
//
// A lane on a GPU: streams, events around its phases, and device memory that holds a whole batch
// (inputs, outputs, kernel workspace). One thread at a time calls Submit. The end of a batch is
// handled on the poller's thread or in Poll; later parts of large items are started there too.
//
// Small items run together on one stream of the highest priority: a gather, the kernels, a scatter.
// A large item (cut_plan.h) is cut into parts that follow each other on streams of the lowest
// priority. The persistent blocks of a part's launch fill all multiprocessors except
// LaneTuning::multiprocessors_free. A small launch at the same time takes those left free, or waits
// until the part's blocks leave (about launch_seconds_max, by the plan); it runs before the parts
// queued after this one. Copies by a kernel need a free multiprocessor too. Copy engines take turns
// between streams, and no copy holds one for more than kEngineCopyBytesMax.
//
// Submit allocates device memory and page-locked memory only if a batch is larger than all before
// it (lane_memory.h and host_arena.h say what may wait then). It waits only if spans are not
// page-locked.

#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/lane/cut_run.h"
#include "kernels/cuda/lane/lane_memory.h"
#include "kernels/cuda/lane/lane_tuning.h"
#include "kernels/cuda/lane/part_pipeline.h"
#include "kernels/cuda/lane/span_copier.h"
#include "kernels/cuda/runtime/append_kernel.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/cuda/runtime/host_arena.h"
#include "kernels/cuda/runtime/pinned_ranges.h"
#include "kernels/util/mutex.h"

namespace attend::cuda {

// Shared by the lanes of a device; outlives them.
struct LaneContext {
  const DeviceInfo& device;
  CompletionPoller& poller;
  DevicePool& pool;
  const PinnedRanges& pinned;
  LaneTuning tuning = {};
  // If set, called for every phase of every batch that succeeded, on the poller's thread or in
  // Poll. `part` is -1 for the phases of small items.
  PhaseSink timeline = {};
};

class CudaLane : public Lane {
 public:
  static Result<std::unique_ptr<Lane>> Make(const LaneContext& context, const LaneOptions& options);
  ~CudaLane() override;  // waits for the batch that runs

  Status Submit(std::span<const WorkItem> items, Done done) override;
  // Batches with cut items are not polled: they take too long.
  Status SubmitPolled(std::span<const WorkItem> items, Done done) override;
  void Poll(std::chrono::nanoseconds at_most) override;

 private:
  // Marks in the small items' stream, in order: before copy-in, after copy-in, after the kernels,
  // after copy-out. kEnd is after everything, including parts.
  enum Mark { kBegin, kCopiedIn, kComputed, kCopiedOut, kEnd, kMarks };

  // A batch from Submit to Done.
  struct Batch {
    std::vector<WorkItem> items;
    std::vector<ItemPlace> places;      // of their spans, in the lane's memory
    std::vector<Attention> attentions;  // with device pointers
    std::vector<AppendItem> appends;    // of the items that append
    std::vector<size_t> appending;      // their indices
    std::vector<std::pair<size_t, BackwardItem>> backward;
    BatchCuts cuts;
    BatchLayout layout;
    std::vector<Status> statuses;
    std::optional<CutRun> run;  // if some items are cut
    bool polled = false;
    bool awaits = false;  // some items wait for events
    Done done;

    bool IsSmall(size_t n) const { return cuts[n].empty(); }
  };
  using BatchPointer = std::shared_ptr<Batch>;

  // A batch whose submitter will poll for completion.
  struct PolledBatch {
    BatchPointer batch;
    cudaError_t recorded = cudaSuccess;
    std::thread::id submitter;
  };

  explicit CudaLane(const LaneContext& context)
      : context_(context), memory_(context.device, context.pool) {}

  Status Open(const LaneOptions& options);

  Status Start(std::span<const WorkItem> items, Done done, bool polled);
  // Empty if the item is computed as one.
  std::vector<AttentionSlice> PartsOf(const WorkItem& item) const;
  Status Prepare(std::span<const WorkItem> items, Batch* batch);
  void PrepareRun(Batch* batch);
  LaunchOptions OptionsOf(bool parts);

  // Makes the lane's stream, and through it the parts' streams, wait for the items' events.
  void Await(Batch* batch);
  void CopyIn(Batch* batch);
  void ClearOutputs(Batch* batch);
  void PoisonInPlace(Batch* batch);
  void Append(Batch* batch);
  void Compute(Batch* batch);
  void ComputeGradients(Batch* batch);
  void CopyOut(Batch* batch);

  // Parts: start the first ones; start the next when the oldest has completed; handle the end.
  void StartParts(const BatchPointer& batch);
  void AwaitPart(const BatchPointer& batch);
  void PartEnded(const BatchPointer& batch, cudaError_t error);
  void AwaitEnd(const BatchPointer& batch, Mark last, cudaError_t recorded);

  // Records a failure in its item's status. True if there was none.
  bool Note(cudaError_t error, const char* where, Status* status);
  SpanCopier::Fail NoteCopies(const char* where, Batch* batch);
  void Finish(Batch* batch, cudaError_t error);
  void ReadTimes(Batch* batch, BatchOutcome* outcome);

  const LaneContext context_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[kMarks] = {};
  PartPipeline pipeline_;
  HostArena lists_;
  LaneMemory memory_;

  Mutex mutex_;
  CondVar idle_;
  bool busy_ ATTEND_GUARDED_BY(mutex_) = false;
  // From SubmitPolled to Poll.
  std::optional<PolledBatch> polled_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::cuda
