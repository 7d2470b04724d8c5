// SPDX-License-Identifier: Apache-2.0
//
// A lane on a GPU: streams, events around its phases, and device memory that holds a whole batch
// (inputs, outputs, kernel workspace). Submit comes from one thread at a time; what ends a batch
// runs on the poller's thread, or in Poll, as does what starts the later parts of large items.
//
// Small items run together on one stream of the highest priority: a gather, the kernels, a scatter.
// A large item (cut_plan.h) is cut into parts that follow each other on streams of the lowest
// priority. Persistent blocks of a part's launch fill all multiprocessors but
// LaneTuning::multiprocessors_free, so that a small launch beside it waits until the part's blocks
// leave (some launch_seconds_max, by the plan) or takes what was left free; what is queued behind
// the part comes after it. Copies by a kernel need a multiprocessor just so. Copy engines take
// turns between streams and are never held for more than kEngineCopyBytesMax.
//
// Submit allocates no memory of the device or page-locked memory, unless a batch is larger than all
// before it (lane_memory.h, host_arena.h say what may wait then), and waits for nothing, unless
// spans are not page-locked.

#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/lane/cut_run.h"
#include "kernels/cuda/lane/lane_memory.h"
#include "kernels/cuda/lane/lane_tuning.h"
#include "kernels/cuda/lane/part_pipeline.h"
#include "kernels/cuda/lane/span_copier.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/cuda/runtime/host_arena.h"
#include "kernels/cuda/runtime/pinned_ranges.h"
#include "kernels/util/mutex.h"

namespace attend::cuda {

// What the lanes of a device share; it outlives them.
struct LaneContext {
  const DeviceInfo& device;
  CompletionPoller& poller;
  DevicePool& pool;
  const PinnedRanges& pinned;
  LaneTuning tuning = {};
  // If set, told of every phase of every batch that went well, on the poller's thread or in Poll:
  // part is -1 for small items'.
  PhaseSink timeline = {};
};

class CudaLane : public Lane {
 public:
  static Result<std::unique_ptr<Lane>> Make(const LaneContext& context, const LaneOptions& options);
  ~CudaLane() override;  // waits for the batch that runs

  Status Submit(std::span<const WorkItem> items, Done done) override;
  // Items that are cut are not polled: their end comes late.
  Status SubmitPolled(std::span<const WorkItem> items, Done done) override;
  void Poll(std::chrono::nanoseconds at_most) override;

 private:
  // Of the small items, in stream order: before copy-in, after copy-in, after the kernels, after
  // copy-out. kEnd is behind everything, if parts run beside them.
  enum Mark { kBegin, kCopiedIn, kComputed, kCopiedOut, kEnd, kMarks };

  // A batch from Submit to Done.
  struct Batch {
    std::vector<WorkItem> items;
    std::vector<ItemPlace> places;      // of their spans in the lane's memory
    std::vector<Attention> attentions;  // the same on the device
    BatchCuts cuts;
    BatchLayout layout;
    std::vector<Status> statuses;
    std::optional<CutRun> run;  // of the items that are cut
    bool polled = false;
    bool awaits = false;  // events of some items
    Done done;

    bool IsSmall(size_t n) const { return cuts[n].empty(); }
  };
  using BatchPointer = std::shared_ptr<Batch>;

  // A batch whose end its submitter will look for.
  struct PolledBatch {
    BatchPointer batch;
    cudaError_t recorded = cudaSuccess;
    std::thread::id submitter;
  };

  explicit CudaLane(const LaneContext& context)
      : context_(context), memory_(context.device, context.pool) {}

  Status Open(const LaneOptions& options);

  Status Start(std::span<const WorkItem> items, Done done, bool polled);
  // Empty: it is computed as one.
  std::vector<AttentionSlice> PartsOf(const WorkItem& item) const;
  Status Prepare(std::span<const WorkItem> items, Batch* batch);
  void PrepareRun(Batch* batch);
  LaunchOptions OptionsOf(bool parts);

  // Makes the lane's stream, and with it the parts', wait for what comes before the items.
  void Await(Batch* batch);
  void CopyIn(Batch* batch);
  void ClearOutputs(Batch* batch);
  void PoisonInPlace(Batch* batch);
  void Compute(Batch* batch);
  void CopyOut(Batch* batch);

  // Parts: the first ones; the next, when the oldest has ended; what comes when there are no more.
  void StartParts(const BatchPointer& batch);
  void AwaitPart(const BatchPointer& batch);
  void PartEnded(const BatchPointer& batch, cudaError_t error);
  void AwaitEnd(const BatchPointer& batch, Mark last, cudaError_t recorded);

  // Puts a failure down to its item; true if there was none.
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
