// SPDX-License-Identifier: Apache-2.0
//
// The large attentions of one batch, part after part through a lane's PartPipeline:
//
//   copy in   | part 1 | part 2 | part 3 | ...
//   kernel             | part 1 | part 2 | part 3 | ...
//   copy out                    | part 1 | part 2 | part 3 | ...
//
// A failure is recorded for the part's item, and the item's later parts are left out. One thread at
// a time: first the one that submits, then the one that learns that parts have ended.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/backend.h"
#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/lane/part_copies.h"
#include "kernels/cuda/lane/part_pipeline.h"
#include "kernels/cuda/launch/launch.h"

namespace attend::cuda {

// What the pointers point to outlives the run.
struct CutItem {
  const WorkItem* item = nullptr;
  const ItemPlace* place = nullptr;
  Status* status = nullptr;
  TwoViews views;
  std::vector<AttentionSlice> slices;
};

struct CutWorkspace {
  char* data = nullptr;  // LaunchBatch's
  int64_t bytes = 0;
  LaunchOptions options;
};

// Takes the events of one copy or kernel that has ended; `part` counts within the batch.
using PhaseSink = std::function<void(PartPipeline::Stage stage, int64_t part, cudaEvent_t begin,
                                     cudaEvent_t end)>;

class CutRun {
 public:
  // Records an error in a status. True if there was none.
  using Note = std::function<bool(cudaError_t error, const char* where, Status* status)>;

  CutRun(PartPipeline& pipeline, std::vector<CutItem> items, const CutWorkspace& workspace,
         Note note, PhaseSink sink);

  // Enqueues the next part. Call only if HasNext, with at most kAhead parts not yet collected.
  void StartNext();
  bool HasNext() const { return started_ < static_cast<int64_t>(steps_.size()); }

  // The event after the oldest part not yet collected, and what recording it returned.
  cudaEvent_t oldest() const { return pipeline_.end(collected_, PartPipeline::kOut); }
  cudaError_t oldest_recorded() const;
  // Call when it has been reached (or never will be): takes the part's times.
  void CollectOldest();
  void CollectAll();

  // Leaves out parts that have not started; the items that lack parts fail.
  void Abandon(const Status& why);

  int64_t parts() const { return static_cast<int64_t>(steps_.size()); }
  int64_t busy_ns(PartPipeline::Stage stage) const { return busy_ns_[stage]; }

 private:
  struct Step {
    size_t item;
    size_t slice;
  };

  // Clears output that no kernel writes, so that it does not return what another batch left there.
  void Clear(const CutItem& item);
  void PoisonInPlace(const CutItem& item);
  void Copy(const std::vector<BoxCopy>& copies, PartPipeline::Stage stage, Status* status);
  void Mark(cudaEvent_t event, PartPipeline::Stage stage, Status* status);
  void Follow(cudaEvent_t event, PartPipeline::Stage stage, Status* status);

  PartPipeline& pipeline_;
  std::vector<CutItem> items_;
  std::vector<PartCopies> copies_;  // of each item
  const CutWorkspace workspace_;
  const Note note_;
  const PhaseSink sink_;
  std::vector<Step> steps_;
  cudaError_t recorded_[PartPipeline::kAhead] = {};
  int64_t started_ = 0;
  int64_t collected_ = 0;
  int64_t busy_ns_[PartPipeline::kStages] = {};
};

// The time between two events that have been reached; 0 if either was not recorded.
int64_t ElapsedNs(cudaEvent_t from, cudaEvent_t to);

}  // namespace attend::cuda
