// SPDX-License-Identifier: Apache-2.0
//
// Lanes of device 0 with numbers of one's own choice (LaneTuning), and attentions in page-locked
// memory: for tests and benchmarks of the lanes. One thread, but for what says otherwise.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/lane/cuda_lane.h"
#include "kernels/cuda/lane/lane_memory.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/cuda/runtime/pinned_ranges.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

class LaneHarness {
 public:
  static Result<std::unique_ptr<LaneHarness>> Make();

  Result<std::unique_ptr<Lane>> MakeLane(const cuda::LaneTuning& tuning,
                                         int64_t workspace_bytes = 1 << 20,
                                         cuda::PhaseSink timeline = {});

  const DeviceInfo& info() const { return info_; }
  cuda::PinnedRanges& pinned() { return pinned_; }

  // The kernel chosen for it, or `kernel`.
  Result<Selection> Choose(const Attention& attention, std::string_view kernel = {}) const;

 private:
  explicit LaneHarness(const DeviceInfo& info) : info_(info), poller_(info.index) {}

  const DeviceInfo info_;
  cuda::PinnedRanges pinned_;
  cuda::DevicePool pool_;
  cuda::CompletionPoller poller_;
};

// Page-locked; null if there was none. Known to `ranges`, if not null.
class PinnedBlock {
 public:
  PinnedBlock(int64_t bytes, cuda::PinnedRanges* ranges);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;
  char* get() const { return data_; }

 private:
  char* data_ = nullptr;
  cuda::PinnedRanges* ranges_;
};

// A page-locked copy of an attention's memory, `shift` bytes behind a 256-byte boundary. `owned`
// must outlive it.
class PinnedAttention {
 public:
  PinnedAttention(OwnedAttention* owned, cuda::PinnedRanges* ranges, int64_t shift = 0);

  bool ok() const { return input_.get() != nullptr && output_.get() != nullptr; }
  WorkItem Item(const Selection& selection) const;
  void Fetch() const;  // copies the output to owned->output

 private:
  OwnedAttention* owned_;
  int64_t shift_;
  PinnedBlock input_;
  PinnedBlock output_;
};

// Submits and waits. Any thread.
Result<BatchOutcome> RunBatch(Lane* lane, std::span<const WorkItem> items);

}  // namespace attend::test
