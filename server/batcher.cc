// SPDX-License-Identifier: Apache-2.0

#include "server/batcher.h"

#include <algorithm>

namespace attend {
namespace {

// What the request adds to its batch in memory: the kernel's workspace too, so that one that keeps
// its score matrix runs alone and cannot make its company fail.
int64_t Bytes(const Request& request) {
  return request.input.bytes() + request.output.bytes() + request.selection.workspace_bytes;
}

}  // namespace

BatchDecision Batcher::Next(const RequestQueue& queue, const LaneState& lanes,
                            TimePoint now) const {
  BatchDecision decision;
  decision.wake = queue.earliest_deadline();
  if (lanes.free == 0 || queue.empty()) return decision;

  // With one lane only there is nothing to keep free.
  const bool large_may_run = lanes.total == 1 || lanes.large + 1 < lanes.total;
  double flops = 0;
  int64_t bytes = 0;
  TimePoint oldest = kNever;
  for (const auto& [key, request] : queue.ordered()) {
    if (static_cast<int64_t>(decision.take.size()) >= options_.batch_requests_max) break;
    if (IsLarge(request->flops, Bytes(*request))) {
      if (!large_may_run) continue;  // smaller ones behind it may pass
      if (!decision.take.empty()) break;
      decision.take.push_back(key);
      decision.large = true;
      return decision;
    }
    flops += request->flops;
    bytes += Bytes(*request);
    if (!decision.take.empty() &&
        (flops > options_.batch_flops_max || bytes > options_.batch_bytes_max)) {
      return decision;  // full
    }
    oldest = std::min(oldest, request->enqueued);
    decision.take.push_back(key);
  }
  const bool full = static_cast<int64_t>(decision.take.size()) >= options_.batch_requests_max;
  if (!full && !decision.take.empty() && options_.batch_delay > Duration::zero() &&
      now < oldest + options_.batch_delay) {
    decision.wake = std::min(decision.wake, oldest + options_.batch_delay);
    decision.take.clear();
  }
  return decision;
}

}  // namespace attend
