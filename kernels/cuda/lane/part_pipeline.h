// SPDX-License-Identifier: Apache-2.0
//
// The streams on which the parts of large attentions follow each other: one copies a part to the
// device while another computes the previous part and a third copies the one before that back. Made
// with the lane, at the lowest priority: blocks of small batches come first whenever a
// multiprocessor is free. One thread at a time.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/util/status.h"

namespace attend::cuda {

class PartPipeline {
 public:
  enum Stage { kIn, kKernel, kOut, kStages };

  // Parts enqueued before the first of them has ended: enough that no stage is idle while the host
  // learns of an end, few enough that enqueueing them does not take long.
  static constexpr int kAhead = 6;

  PartPipeline() = default;
  ~PartPipeline();  // the streams must be idle
  PartPipeline(const PartPipeline&) = delete;
  PartPipeline& operator=(const PartPipeline&) = delete;

  Status Open(const std::string& where);

  cudaStream_t stream(Stage stage) const { return streams_[stage]; }
  // The events of part n; part n + kAhead uses them again.
  cudaEvent_t begin(int64_t n, Stage stage) const { return marks_[n % kAhead].begin[stage]; }
  cudaEvent_t end(int64_t n, Stage stage) const { return marks_[n % kAhead].end[stage]; }
  cudaEvent_t cleared() const { return cleared_; }

  // Makes later work on any of the streams wait for `event`.
  cudaError_t WaitFor(cudaEvent_t event);
  // Makes later work on `stream` wait for all current work on the three.
  cudaError_t Join(cudaStream_t stream);
  // Waits for the three on the host. Only if events have failed.
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
