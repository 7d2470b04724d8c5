// SPDX-License-Identifier: Apache-2.0
//
// A device for tests: computes with the double-precision reference, when the test allows it. A test
// can hold batches at a gate, let the N-th call of every entry point fail, lose the device and
// plant faults in O. Every lane has one thread, which computes what its submitter does not poll;
// all controls may be called from any thread. Host memory still held when the device is destroyed
// fails the test.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/contract/backend.h"
#include "tests/server/support/call_faults.h"
#include "tests/server/support/fake_staging.h"
#include "tests/server/support/test_arena.h"

namespace attend::test {

class FakeBackend final : public Backend {
 public:
  // Computes one item into its output.
  using Compute = std::function<void(const Attention&)>;

  explicit FakeBackend(std::string name = "cpu", DeviceKind kind = DeviceKind::kCpu);
  ~FakeBackend() override;

  const DeviceInfo& info() const override { return info_; }
  HostAllocator& host_allocator() override;
  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) override;
  bool RunsInParts(const Attention& attention, const Selection& selection) const override;
  DeviceMemoryUse memory_use() const override;
  // One at a time.
  Result<std::unique_ptr<DeviceArena>> MakeArena(int64_t bytes) override;
  // Reports session memory as not the host's, although it is.
  void MakeArenasFar() { arenas_on_host_ = false; }
  TestArena& arena() { return *arena_; }
  bool Gathers() const override { return gathers_; }
  bool CanStage() const override { return stream_ != nullptr; }
  Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host,
                                               std::shared_ptr<void> owner) override;

  // Replaces the reference, for instance by something that takes no time. Before the first batch.
  void SetCompute(Compute compute);
  // Items are computed in copies of their spans, as on a GPU. Before the first batch.
  void MoveSpans();
  // The same, and items' inputs may be gathered. Before the server starts.
  void GatherSpans();
  void StopGathering() { gathers_ = false; }
  int64_t gathered_items() const;  // items computed so
  // Items for which `cut` is true count as computed in `parts` parts. Before the first batch.
  void CutItems(std::function<bool(const Problem&)> cut, int64_t parts);
  void SetMemoryUse(const DeviceMemoryUse& use);
  // Gives the device staging memory. Before anything else.
  void AddStaging() { stream_ = std::make_unique<FakeStream>(); }
  FakeStream& staging() { return *stream_; }
  // Changes an item's output after it was computed.
  void Corrupt(Compute corrupt);

  // The device imports other processes' memory; before the server starts. The memory is the test's
  // own, lent under handles of arbitrary bytes. Nothing may be imported when the device is
  // destroyed.
  void SetUuid(std::string uuid) { info_.uuid = std::move(uuid); }
  void Lend(const std::string& handle, const ImportedMemory& memory);
  // An event that is reached when the test says so.
  void LendEvent(const std::string& handle);
  void Reach(const std::string& handle);
  int64_t imported() const;  // memory and events imported now
  // Imports are refused with this status, until an OK status is set.
  void RefuseImports(Status status);
  Result<ImportedMemory> ImportMemory(std::string_view handle) override;
  void ReleaseMemory(char* data) override;
  Result<std::unique_ptr<DeviceEvent>> ImportEvent(std::string_view handle) override;

  // Items whose stop flag is set end with CANCELLED, and do not wait at the gate. Before the first
  // batch.
  void HonourStops() { honours_stops_ = true; }

  // Accepted batches wait at the gate before they compute.
  void Hold();
  void Release();     // opens the gate for good
  void ReleaseOne();  // lets one batch pass a closed gate

  // The N-th call from now (1 = the next) fails with `status`.
  void FailSubmit(int n, Status status);    // nothing starts
  void FailItem(int n, Status status);      // the rest of its batch succeeds
  void FailBatch(int n, Status status);     // started, and all its items end with the status
  void FailAllocate(int n, Status status);  // of host memory
  void FailRegister(int n, Status status);  // of the caller's pages
  void FailMakeLane(int n, Status status);
  void FailImportMemory(int n, Status status);  // nothing is imported
  void FailImportEvent(int n, Status status);
  // The N-th batch from now and all later ones end with device_lost, and with UNAVAILABLE or the
  // given status: a GPU reports INTERNAL for the batch during which it is lost.
  void LoseDevice(int n = 1);
  void LoseDevice(int n, Status found);
  // Removes faults that have not been reached.
  void ForgetFaults();

  // Calls since the start, including failed ones.
  struct Calls {
    int64_t submit = 0;
    int64_t item = 0;
    int64_t batch = 0;
    int64_t registration = 0;
    int64_t memory_import = 0;
    int64_t event_import = 0;
  };
  Calls calls() const;
  int64_t submitted_batches() const;
  int64_t submitted_items() const;
  // Sizes of the accepted batches, in order.
  std::vector<int64_t> batch_sizes() const;
  // Waits until that many batches were accepted since the start.
  void WaitForBatches(int64_t count) const;
  // Waits until that many batches are at the gate.
  void WaitForWaiting(int64_t count) const;

 private:
  class FakeLane;
  class FakeAllocator;
  class FakeEvent;
  friend class FakeLane;
  friend class FakeAllocator;

  Status Accept(int64_t items);  // counts a submission, or refuses it
  Status AcceptAllocation();     // the same for host memory
  Status AcceptRegistration();
  Status LostStatus() const;
  bool GateIsClosed() const;
  void PassGate(const std::vector<WorkItem>& items);
  // Waits for the events of these items.
  void Await(const std::vector<WorkItem>& items);
  BatchOutcome RunItems(const std::vector<WorkItem>& items);

  DeviceInfo info_;
  bool arenas_on_host_ = true;
  TestArena* arena_ = nullptr;  // the newest one
  std::unique_ptr<FakeStream> stream_;
  std::unique_ptr<FakeAllocator> allocator_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Compute compute_;
  Compute corrupt_;
  bool moves_spans_ = false;
  std::atomic<bool> gathers_{false};
  int64_t gathered_items_ = 0;
  std::function<bool(const Problem&)> cut_;
  int64_t cut_parts_ = 0;
  DeviceMemoryUse memory_use_;
  bool held_ = false;
  int64_t passes_ = 0;
  std::atomic<bool> honours_stops_{false};
  int64_t waiting_ = 0;
  int64_t items_accepted_ = 0;
  CallFaults submits_;
  CallFaults items_;
  CallFaults batches_;
  CallFaults allocations_;
  CallFaults registrations_;
  CallFaults lanes_;
  CallFaults memory_imports_;
  CallFaults event_imports_;
  CallFaults losses_;  // counts batches, as batches_ does
  bool lost_ = false;
  std::map<std::string, ImportedMemory, std::less<>> lent_;
  std::map<std::string, bool, std::less<>> events_;  // whether they have been reached
  std::map<char*, int64_t> imported_memory_;
  int64_t imported_events_ = 0;
  Status import_refusal_;
  std::vector<int64_t> batch_sizes_;
};

}  // namespace attend::test
