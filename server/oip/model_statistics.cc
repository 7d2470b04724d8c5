// SPDX-License-Identifier: Apache-2.0
//
// Triton counts executions per batch, but here the requests of a batch may belong to different
// models and end one by one. So each request adds 1 / (requests in its batch) of an execution and
// of its times, as doubles, to its model's entry for that batch size; the sums are rounded when
// they are read.

#include "server/oip/model_statistics.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>

namespace attend::oip {
namespace {

uint64_t MillisecondsNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

// Batch sizes above this are rounded up to powers of two, so that clients cannot grow the table.
constexpr uint64_t kExactSizes = 256;

uint64_t SizeOf(const Request& request) {
  const int64_t elements = std::max({request.batch_elements, request.elements, int64_t{1}});
  const auto size = static_cast<uint64_t>(elements);
  return size <= kExactSizes ? size : std::bit_ceil(size);
}

uint64_t Rounded(double number) { return static_cast<uint64_t>(std::llround(number)); }

uint64_t Nanoseconds(int64_t ns) { return ns < 0 ? 0 : static_cast<uint64_t>(ns); }

void Set(uint64_t count, uint64_t ns, inference::StatisticDuration* out) {
  out->set_count(count);
  out->set_ns(ns);
}

}  // namespace

void ModelStatistics::Count(const Model& model, const Request& request, int64_t total_ns) {
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
  Phases<uint64_t> phases;
  phases.input_ns = Nanoseconds(NanosecondsBetween(request.received, request.enqueued)) +
                    Nanoseconds(request.copy_in_ns);
  phases.infer_ns = Nanoseconds(request.kernel_ns);
  phases.output_ns = Nanoseconds(request.copy_out_ns);
  const auto add = [&phases](auto& to, auto share) {
    to.input_ns += static_cast<decltype(share)>(phases.input_ns) * share;
    to.infer_ns += static_cast<decltype(share)>(phases.infer_ns) * share;
    to.output_ns += static_cast<decltype(share)>(phases.output_ns) * share;
  };
  const double share = 1.0 / static_cast<double>(std::max<int64_t>(1, request.batch_requests));
  ++sums.succeeded;
  sums.succeeded_ns += total;
  sums.queue_ns += Nanoseconds(NanosecondsBetween(request.enqueued, request.started));
  add(sums.phases, uint64_t{1});
  sums.elements += static_cast<uint64_t>(request.elements);
  sums.batches += share;
  sums.last_ms = now_ms;
  Batches& batches = sums.by_size[SizeOf(request)];
  batches.count += share;
  add(batches.phases, share);
}

void ModelStatistics::Fill(const Model& model, inference::ModelStatistics& out) const {
  const Entry& entry = models_[static_cast<size_t>(IndexOf(model))];
  out.set_name(model.name);
  out.set_version(kVersion);
  const MutexLock lock(entry.mutex);
  const Sums& sums = entry.sums;
  out.set_last_inference(sums.last_ms);
  out.set_inference_count(sums.elements);
  out.set_execution_count(Rounded(sums.batches));
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
    const uint64_t count = Rounded(batches.count);
    each->set_batch_size(size);
    Set(count, Rounded(batches.phases.input_ns), each->mutable_compute_input());
    Set(count, Rounded(batches.phases.infer_ns), each->mutable_compute_infer());
    Set(count, Rounded(batches.phases.output_ns), each->mutable_compute_output());
  }
}

}  // namespace attend::oip
