// SPDX-License-Identifier: Apache-2.0
//
// Copies chunked uploads to a device while they arrive, so that little is left to copy after the
// last chunk. Purely an optimisation: the host block always receives every byte, and a request that
// cannot get a device copy, or loses it, falls back to the normal path.
//
//   copying --Finish: the lane reads the copy--> used
//      |
//      +------Drop: a copy failed, the device was lost, its queue was full, the upload ended-->
//             dropped: the block alone serves the request
//
// Ownership. The block on the host, and the request's share of the device's staging memory, belong
// to one holder (StagedInput::Held) with two owners: the StagedInput, for as long as its request
// lives, and the device's Staging, for as long as an enqueued copy may read the block or write to
// the device. So no byte of the block returns to its pool, and none of the device's share counts as
// free, while a copy still uses it. No thread waits for that: the last owner releases the holder,
// which for an aborted upload is a thread of the backend, a moment later. Kernels read the device's
// memory only after StagedInput::Finish, and have ended by the request's end.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/mutex.h"
#include "server/memory/host_pool.h"
#include "server/request/device_copy.h"
#include "server/request/request.h"
#include "server/schedule/router.h"
#include "server/upload/arrived_pieces.h"

namespace attend {

struct StagingOptions {
  // Staging memory on each device, at most a quarter of the device's memory; 0: no staging.
  int64_t bytes_max = int64_t{4} << 30;
  // At least 1. Tensors with fewer bytes are copied once they are complete.
  int64_t bytes_min = int64_t{4} << 20;
  // Minimum size of one copy.
  int64_t piece_bytes = int64_t{1} << 20;
};

const char* StagingEndName(StagingEnd end);

// The budget of staging memory on all devices, and statistics of its use. Thread-safe.
class StagingBudget {
 public:
  // Returned by the destructor.
  class Hold {
   public:
    Hold(StagingBudget& budget, int device, int64_t bytes)
        : budget_(&budget), device_(device), bytes_(bytes) {}
    Hold(Hold&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)),
          device_(other.device_),
          bytes_(other.bytes_) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (budget_ != nullptr) budget_->Return(device_, bytes_);
    }

   private:
    StagingBudget* budget_;
    int device_;
    int64_t bytes_;
  };

  struct Limit {
    std::string device;
    int64_t bytes_max = 0;
  };
  explicit StagingBudget(std::vector<Limit> limits);  // by device
  ~StagingBudget();  // waits until every hold is returned: copies may be in progress
  StagingBudget(const StagingBudget&) = delete;
  StagingBudget& operator=(const StagingBudget&) = delete;

  // Empty if not enough is left.
  std::optional<Hold> Take(int device, int64_t bytes);
  void CountBytes(int64_t bytes) { copied_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void CountEnd(StagingEnd end) {
    ends_[static_cast<size_t>(end)].fetch_add(1, std::memory_order_relaxed);
  }

  int devices() const { return static_cast<int>(limits_.size()); }
  const Limit& limit(int device) const { return limits_[device]; }
  int64_t held_bytes(int device) const;
  int64_t copied_bytes() const { return copied_bytes_.load(std::memory_order_relaxed); }
  int64_t ends(StagingEnd end) const {
    return ends_[static_cast<size_t>(end)].load(std::memory_order_relaxed);
  }

 private:
  void Return(int device, int64_t bytes);

  const std::vector<Limit> limits_;
  mutable Mutex mutex_;
  CondVar returned_;
  int64_t holds_ ATTEND_GUARDED_BY(mutex_) = 0;
  std::vector<int64_t> held_bytes_ ATTEND_GUARDED_BY(mutex_);  // by device
  std::atomic<int64_t> copied_bytes_{0};
  std::array<std::atomic<int64_t>, kStagingEndCount> ends_{};
};

// One request's input block, and the device copy of its tensors while there is one. Owned by the
// request.
class StagedInput final : public DeviceCopy {
 public:
  ~StagedInput() override;  // the memory is freed once no copy uses it, see above
  StagedInput(const StagedInput&) = delete;
  StagedInput& operator=(const StagedInput&) = delete;

  void Arrived(const char* data, int64_t bytes) override;
  bool Finish() override;
  int device() const override { return copy_ == nullptr ? -1 : device_; }
  void Drop(StagingEnd why) override;
  void Apply(WorkItem* item) override;

 private:
  friend class Stager;
  struct Held {
    StagingBudget::Hold hold;
    HostBlock block;  // freed first: once the hold is returned, so is the block
  };

  // Until the upload is complete, the router expects `chosen.cost` on the device. The tensors are
  // the block's first `bytes`.
  StagedInput(StagingBudget& budget, Router& router, const Candidate& chosen, int64_t bytes,
              int64_t piece_bytes);
  const char* block() const { return static_cast<const char*>(held_->block.data()); }
  void ForgetCost();

  StagingBudget& budget_;
  Router& router_;
  const int device_;
  int64_t expected_cost_;
  const int64_t bytes_;
  ArrivedPieces pieces_;
  std::atomic<bool> failed_{false};  // a copy was refused
  bool finished_ = false;            // all bytes have arrived
  bool used_ = false;
  std::shared_ptr<Held> held_;
  std::unique_ptr<Staging> copy_;  // null: dropped
};

// Creates the staging of uploads. Thread-safe.
class Stager {
 public:
  // `backends` and `router` must outlive it.
  Stager(const StagingOptions& options, std::span<const std::unique_ptr<Backend>> backends,
         Router& router);

  // Gives a placed request whose bytes have not arrived a copy of its input block on the device
  // that the router expects to run it, if its tensors are large enough and the device needs a copy
  // and has memory for it. `tensors` must be in ascending order from the beginning of the block,
  // less than kTensorAlignBytes apart, followed by everything else the kernel reads. May wait for a
  // driver.
  void Stage(Request& request, std::span<const HostSpan> tensors);

  const StagingBudget& budget() const { return budget_; }

 private:
  // Takes `block` and returns its new owner, or leaves it in place and returns null.
  std::unique_ptr<StagedInput> Make(const Candidate& chosen, HostBlock& block,
                                    std::span<const HostSpan> tensors);

  const StagingOptions options_;
  const std::span<const std::unique_ptr<Backend>> backends_;
  Router& router_;
  StagingBudget budget_;
  bool possible_ = false;  // on some device
};

}  // namespace attend
