// SPDX-License-Identifier: Apache-2.0

#include "server/oip/model_statistics.h"

#include <chrono>
#include <cmath>

namespace attend::oip {
namespace {

uint64_t MillisecondsNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

uint64_t Nanoseconds(int64_t ns) { return ns < 0 ? 0 : static_cast<uint64_t>(ns); }

void Set(uint64_t count, uint64_t ns, inference::StatisticDuration* out) {
  out->set_count(count);
  out->set_ns(ns);
}

}  // namespace

void ModelStatistics::Count(const Model& model, const Request& request, int64_t total_ns,
                            int64_t elements) {
  const uint64_t total = Nanoseconds(total_ns);
  const uint64_t now_ms = MillisecondsNow();
  Entry& entry = models_[static_cast<size_t>(IndexOf(model))];
  const MutexLock lock(entry.mutex);
  Sums& sums = entry.sums;
  if (!request.status.ok()) {
    ++sums.failed;
    sums.failed_ns += total;
    return;
  }
  Phases phases;
  phases.input_ns = Nanoseconds(NanosecondsBetween(request.received, request.enqueued)) +
                    Nanoseconds(request.copy_in_ns);
  phases.infer_ns = Nanoseconds(request.kernel_ns);
  phases.output_ns = Nanoseconds(request.copy_out_ns);
  const auto add = [&phases](Phases& to) {
    to.input_ns += phases.input_ns;
    to.infer_ns += phases.infer_ns;
    to.output_ns += phases.output_ns;
  };
  const int64_t size = request.batch_requests > 0 ? request.batch_requests : 1;
  ++sums.succeeded;
  sums.succeeded_ns += total;
  sums.queue_ns += Nanoseconds(NanosecondsBetween(request.enqueued, request.started));
  add(sums.phases);
  sums.elements += static_cast<uint64_t>(elements);
  sums.batches += 1.0 / static_cast<double>(size);
  sums.last_ms = now_ms;
  Batches& batches = sums.by_size[static_cast<uint64_t>(size)];
  ++batches.requests;
  add(batches.phases);
}

void ModelStatistics::Fill(const Model& model, inference::ModelStatistics& out) const {
  const Entry& entry = models_[static_cast<size_t>(IndexOf(model))];
  out.set_name(model.name);
  out.set_version(kVersion);
  const MutexLock lock(entry.mutex);
  const Sums& sums = entry.sums;
  out.set_last_inference(sums.last_ms);
  out.set_inference_count(sums.elements);
  out.set_execution_count(static_cast<uint64_t>(std::llround(sums.batches)));
  inference::InferStatistics* const all = out.mutable_inference_stats();
  Set(sums.succeeded, sums.succeeded_ns, all->mutable_success());
  Set(sums.failed, sums.failed_ns, all->mutable_fail());
  Set(sums.succeeded, sums.queue_ns, all->mutable_queue());
  Set(sums.succeeded, sums.phases.input_ns, all->mutable_compute_input());
  Set(sums.succeeded, sums.phases.infer_ns, all->mutable_compute_infer());
  Set(sums.succeeded, sums.phases.output_ns, all->mutable_compute_output());
  all->mutable_cache_hit();
  all->mutable_cache_miss();
  for (const auto& [size, batches] : sums.by_size) {
    inference::InferBatchStatistics* const each = out.add_batch_stats();
    const uint64_t count = (batches.requests + size / 2) / size;
    each->set_batch_size(size);
    Set(count, batches.phases.input_ns / size, each->mutable_compute_input());
    Set(count, batches.phases.infer_ns / size, each->mutable_compute_infer());
    Set(count, batches.phases.output_ns / size, each->mutable_compute_output());
  }
}

}  // namespace attend::oip
