// SPDX-License-Identifier: Apache-2.0
//
// A device for tests: it computes with the double-precision reference, when the test lets it. A
// test can hold batches at a gate, fail the N-th submission or item, lose the device and plant
// faults in O. Every lane has one thread; all controls may be called from any thread.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace attend::testing {

class FakeBackend final : public Backend {
 public:
  // Computes one item into its output.
  using Compute = std::function<void(const Attention&)>;

  explicit FakeBackend(std::string name = "cpu", DeviceKind kind = DeviceKind::kCpu);
  ~FakeBackend() override;

  const DeviceInfo& info() const override { return info_; }
  HostAllocator& host_allocator() override;
  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) override;

  // Replaces the reference, for instance by something that takes no time. Before the first batch.
  void SetCompute(Compute compute);
  // From now on items are computed in copies of their spans, as a GPU does. Before the first batch.
  void MoveSpans();
  // Changes an item's output after it was computed.
  void Corrupt(Compute corrupt);

  // From now on accepted batches wait at the gate, before they compute.
  void Hold();
  void Release();     // opens the gate for good
  void ReleaseOne();  // lets one batch pass a closed gate
  // The N-th submission from now (1 = the next) is refused with `status`; nothing starts.
  void FailSubmit(int n, Status status);
  // The N-th item from now ends with `status`, its batch otherwise well.
  void FailItem(int n, Status status);
  // The next batch ends with UNAVAILABLE and device_lost.
  void LoseDevice();
  // The next MakeLane fails.
  void FailMakeLane(Status status);

  int64_t submitted_batches() const;
  int64_t submitted_items() const;
  int64_t waiting_batches() const;  // at the gate now
  // Sizes of the accepted batches, in order.
  std::vector<int64_t> batch_sizes() const;
  // Waits until that many batches were accepted since the start.
  void WaitForBatches(int64_t count) const;
  // Waits until that many batches stand at the gate.
  void WaitForWaiting(int64_t count) const;

 private:
  class FakeLane;
  friend class FakeLane;

  Status Accept(int64_t items);  // counts a submission, or refuses it
  void PassGate();
  BatchOutcome RunItems(const std::vector<WorkItem>& items);

  DeviceInfo info_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Compute compute_;
  Compute corrupt_;
  bool moves_spans_ = false;
  bool held_ = false;
  int64_t passes_ = 0;
  int64_t waiting_ = 0;
  int64_t submissions_ = 0;
  int64_t items_accepted_ = 0;
  int64_t items_run_ = 0;
  bool lose_device_ = false;
  Status make_lane_status_;
  std::map<int64_t, Status> submit_faults_;  // by submission number
  std::map<int64_t, Status> item_faults_;    // by number of the item run
  std::vector<int64_t> batch_sizes_;
};

}  // namespace attend::testing
