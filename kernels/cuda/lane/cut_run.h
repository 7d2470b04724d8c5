// SPDX-License-Identifier: Apache-2.0
//
// Runs the large attentions of one batch, part after part, through a lane's PartPipeline:
//
//   copy in   | part 1 | part 2 | part 3 | ...
//   kernel             | part 1 | part 2 | part 3 | ...
//   copy out                    | part 1 | part 2 | part 3 | ...
//
// A failure is recorded for the part's item, whose later parts are skipped. One thread at a time:
// first the submitting thread, then the one that handles completed parts.

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

// Everything pointed to must outlive the run.
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

// Receives the events of a completed copy or kernel; `part` is counted within the batch.
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
  // Call when that event has been reached (or never will be): reads the part's times.
  void CollectOldest();
  void CollectAll();

  // Skips parts that have not started; items that lack parts fail.
  void Abandon(const Status& why);

  int64_t parts() const { return static_cast<int64_t>(steps_.size()); }
  int64_t busy_ns(PartPipeline::Stage stage) const { return busy_ns_[stage]; }

 private:
  struct Step {
    size_t item;
    size_t slice;
  };

  // Clears output bytes that no kernel writes, so that they do not return another batch's data.
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

// Time between two reached events; 0 if either was not recorded.
int64_t ElapsedNs(cudaEvent_t from, cudaEvent_t to);

}  // namespace attend::cuda
