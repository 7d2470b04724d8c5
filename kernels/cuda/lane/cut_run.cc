// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/lane/cut_run.h"

#include <utility>

#include "kernels/cuda/lane/engine_copy.h"

namespace attend::cuda {

using Stage = PartPipeline::Stage;

CutRun::CutRun(PartPipeline& pipeline, std::vector<CutItem> items, const CutWorkspace& workspace,
               Note note, PhaseSink sink)
    : pipeline_(pipeline),
      items_(std::move(items)),
      workspace_(workspace),
      note_(std::move(note)),
      sink_(std::move(sink)) {
  for (size_t n = 0; n < items_.size(); ++n) {
    copies_.emplace_back(items_[n].views, items_[n].item->in_place);
    for (size_t slice = 0; slice < items_[n].slices.size(); ++slice) steps_.push_back({n, slice});
  }
}

void CutRun::Mark(cudaEvent_t event, Stage stage, Status* status) {
  note_(cudaEventRecord(event, pipeline_.stream(stage)), "marking a part", status);
}

void CutRun::Follow(cudaEvent_t event, Stage stage, Status* status) {
  note_(cudaStreamWaitEvent(pipeline_.stream(stage), event), "ordering parts", status);
}

void CutRun::Copy(const std::vector<BoxCopy>& copies, Stage stage, Status* status) {
  const bool in = stage == PartPipeline::kIn;
  for (const BoxCopy& copy : copies) {
    if (!status->ok()) return;
    note_(EnqueueCopy(copy, in ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                      pipeline_.stream(stage)),
          in ? "copy in" : "copy out", status);
  }
}

void CutRun::Clear(const CutItem& item) {
  const WorkItem& work = *item.item;
  const bool dense = OutputIsDense(work);
  if (dense && !work.poison_output) return;
  const cudaStream_t out = pipeline_.stream(PartPipeline::kOut);
  for (int n = 0; n < work.outputs.size(); ++n) {
    note_(cudaMemsetAsync(item.place->outputs[n], work.poison_output ? kPoison : 0,
                          static_cast<size_t>(work.outputs[n].bytes), out),
          "clearing the output", item.status);
  }
  if (work.poison_output) PoisonInPlace(item);
  Mark(pipeline_.cleared(), PartPipeline::kOut, item.status);
  Follow(pipeline_.cleared(), PartPipeline::kKernel, item.status);
  if (dense) return;
  // Copies out the gaps between runs; parts copy the rest later, on the same stream.
  std::vector<BoxCopy> copies;
  for (int n = 0; n < work.outputs.size(); ++n) {
    const HostSpan& span = work.outputs[n];
    copies.push_back({static_cast<char*>(span.data), item.place->outputs[n], span.bytes, 1, 0});
  }
  Copy(copies, PartPipeline::kOut, item.status);
}

void CutRun::PoisonInPlace(const CutItem& item) {
  const Result<std::vector<ByteRuns>> outputs = OutputsInPlace(*item.item);
  if (!outputs.ok()) {
    *item.status = outputs.status();
    return;
  }
  for (const ByteRuns& runs : *outputs) {
    note_(EnqueueFill(runs, kPoison, pipeline_.stream(PartPipeline::kOut)), "clearing the output",
          item.status);
  }
}

void CutRun::StartNext() {
  const int64_t n = started_++;
  const Step& step = steps_[static_cast<size_t>(n)];
  const CutItem& item = items_[step.item];
  Status* const status = item.status;
  TwoViews part;
  if (status->ok()) {
    Result<TwoViews> taken = TakeSlice(item.views, item.slices[step.slice]);
    if (taken.ok()) {
      part = *std::move(taken);
    } else {
      *status = taken.status();
    }
  }
  // Recorded even after a failure, so that nothing waits for the part forever.
  Mark(pipeline_.begin(n, PartPipeline::kIn), PartPipeline::kIn, status);
  if (step.slice == 0 && status->ok()) {
    Clear(item);
    Copy(copies_[step.item].Arrays(), PartPipeline::kIn, status);
  }
  if (status->ok()) Copy(copies_[step.item].In(part), PartPipeline::kIn, status);
  Mark(pipeline_.end(n, PartPipeline::kIn), PartPipeline::kIn, status);

  Follow(pipeline_.end(n, PartPipeline::kIn), PartPipeline::kKernel, status);
  Mark(pipeline_.begin(n, PartPipeline::kKernel), PartPipeline::kKernel, status);
  if (status->ok()) {
    const LaunchItem launch{item.item->selection.kernel, part.device, kDefaultConfig};
    *status = LaunchBatch({&launch, 1}, workspace_.data, workspace_.bytes,
                          pipeline_.stream(PartPipeline::kKernel), workspace_.options);
  }
  Mark(pipeline_.end(n, PartPipeline::kKernel), PartPipeline::kKernel, status);

  Follow(pipeline_.end(n, PartPipeline::kKernel), PartPipeline::kOut, status);
  Mark(pipeline_.begin(n, PartPipeline::kOut), PartPipeline::kOut, status);
  if (status->ok()) {
    Copy(copies_[step.item].Out(part), PartPipeline::kOut, status);
  }
  const cudaError_t recorded =
      cudaEventRecord(pipeline_.end(n, PartPipeline::kOut), pipeline_.stream(PartPipeline::kOut));
  note_(recorded, "marking a part", status);
  recorded_[n % PartPipeline::kAhead] = recorded;
}

cudaError_t CutRun::oldest_recorded() const { return recorded_[collected_ % PartPipeline::kAhead]; }

void CutRun::CollectOldest() {
  const int64_t n = collected_++;
  for (int index = 0; index < PartPipeline::kStages; ++index) {
    const auto stage = static_cast<Stage>(index);
    const cudaEvent_t begin = pipeline_.begin(n, stage);
    const cudaEvent_t end = pipeline_.end(n, stage);
    busy_ns_[stage] += ElapsedNs(begin, end);
    if (sink_) sink_(stage, n, begin, end);
  }
}

void CutRun::CollectAll() {
  while (collected_ < started_) CollectOldest();
}

void CutRun::Abandon(const Status& why) {
  for (size_t n = static_cast<size_t>(started_); n < steps_.size(); ++n) {
    Status* const status = items_[steps_[n].item].status;
    if (status->ok()) *status = why;
  }
  steps_.resize(static_cast<size_t>(started_));
}

int64_t ElapsedNs(cudaEvent_t from, cudaEvent_t to) {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, from, to) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
}

}  // namespace attend::cuda
