// SPDX-License-Identifier: Apache-2.0
//
// The streams of a three-stage pipeline for parts of large attentions: one copies a part in while
// another computes the previous part and a third copies out the one before that. Created with the
// lane, at the lowest priority, so that blocks of small batches go first whenever a multiprocessor
// is free. One thread at a time.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend::cuda {

class PartPipeline {
 public:
  enum Stage { kIn, kKernel, kOut, kStages };

  // Parts in flight: enough that no stage idles while the host handles a completion, few enough
  // that enqueueing them is quick.
  static constexpr int kAhead = 6;

  PartPipeline() = default;
  ~PartPipeline();  // the streams must be idle
  PartPipeline(const PartPipeline&) = delete;
  PartPipeline& operator=(const PartPipeline&) = delete;

  Status Open(const std::string& where);

  cudaStream_t stream(Stage stage) const { return streams_[stage]; }
  // Events of part n; part n + kAhead reuses them.
  cudaEvent_t begin(int64_t n, Stage stage) const { return marks_[n % kAhead].begin[stage]; }
  cudaEvent_t end(int64_t n, Stage stage) const { return marks_[n % kAhead].end[stage]; }
  cudaEvent_t cleared() const { return cleared_; }

  // Makes later work on any of the streams wait for `event`.
  cudaError_t WaitFor(cudaEvent_t event);
  // Makes later work on `stream` wait for all current work on the three.
  cudaError_t Join(cudaStream_t stream);
  // Blocks until the three streams are idle. Only if events have failed.
  void Synchronize();

 private:
  struct Marks {
    cudaEvent_t begin[kStages] = {};
    cudaEvent_t end[kStages] = {};
  };

  cudaStream_t streams_[kStages] = {};
  Marks marks_[kAhead];
  cudaEvent_t cleared_ = nullptr;
  cudaEvent_t joined_[kStages] = {};
};

}  // namespace attend::cuda
