// SPDX-License-Identifier: Apache-2.0
//
// The server without its wire: devices, queues, schedulers, lanes, checks. gRPC threads call Admit,
// Submit and Cancel, which do not block. One exception: Submit may start a small request, poll
// briefly for its end and answer it (device_worker.h).

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/device/completion.h"
#include "server/device/device_worker.h"
#include "server/engine/checker.h"
#include "server/engine/placement.h"
#include "server/memory/host_pool.h"
#include "server/metrics/metrics.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"
#include "server/schedule/router.h"
#include "server/schedule/tenants.h"
#include "server/upload/staging.h"

namespace attend {

struct EngineOptions {
  DeviceWorkerOptions worker;                      // of every device
  Tenants tenants;                                 // that share it
  int64_t memory_budget_bytes = int64_t{4} << 30;  // tensor bytes held at once
  // Kernel cost (kernels/contract/cost.h) of one request; 0: no bound. Unset: what its device
  // computes in ten minutes.
  std::optional<double> request_cost_max;
  CheckerOptions checker;
  int completion_threads = 2;
  StagingOptions staging;
};

// Given to a request before its bytes are placed.
struct Admission {
  HostBlock input;
  HostBlock output;
  Placement placement;  // its candidates only
};

class Engine {
 public:
  // `backends` must not be empty. Makes the lanes; a device that cannot make its lanes is an error.
  // `metrics` and `clock` must outlive the engine.
  static Result<std::unique_ptr<Engine>> Make(std::vector<std::unique_ptr<Backend>> backends,
                                              const EngineOptions& options, Metrics& metrics,
                                              const Clock& clock);
  ~Engine();  // Stop() first, if not done
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Allocates host memory of `tenant` for a request that some healthy device can run, for that pass
  // of the problem; only `pinned` may run it, unless that is kAnyDevice. Refusals change nothing:
  // UNIMPLEMENTED or INVALID_ARGUMENT (Select's reason), RESOURCE_EXHAUSTED (memory), UNAVAILABLE
  // (no healthy device).
  Result<Admission> Admit(const Problem& problem, std::string_view kernel, int64_t input_bytes,
                          int64_t output_bytes, int tenant, int pinned = kAnyDevice,
                          Pass pass = Pass::kForward, HostBlock input = {});

  // Decides where and how an admitted request runs (placement.h). Call it before the tensors' bytes
  // are placed; the attention's arrays have their values, and the spans are set. Refuses as Admit
  // does, and with INVALID_ARGUMENT if the request costs too much (request_cost_max). Submit calls
  // this for a request that has no placement, and again if a device was lost since.
  Status Place(Request& request) const;

  // Whether the request may come to be checked.
  bool MayCheck(const Request& request) const;

  // Refuses a placed request that no device of its placement is expected to answer before its
  // deadline (scheduler.h), so that its bytes need not be copied. Submit asks again.
  Status CheckInTime(Request& request);

  // Stager::Stage. Not on gRPC's threads.
  void Stage(Request& request, std::span<const HostSpan> tensors) {
    stager_->Stage(request, tensors);
  }

  // Queues the request on the device of its placement with the least outstanding cost (router.h).
  // The device is chosen now because a client may take seconds to send after Admit. If one has a
  // good copy of the input, it is tried first.
  // Takes `request` if and only if OK. The request then ends with one call of its responder, which
  // may happen before Submit returns if the request may_end_in_submit. Otherwise
  // RESOURCE_EXHAUSTED (every queue is full, or the checker's; it would be late), UNAVAILABLE
  // (draining, no healthy device), DEADLINE_EXCEEDED (already past), or Admit's error if every
  // device that could run it is lost. May throw std::bad_alloc, and then has not taken the request
  // either.
  Status Submit(std::unique_ptr<Request>& request);

  // Plans what Submit has left queued for this (Request::planner). Requests may end before it
  // returns. Cheap if there is nothing.
  void PlanNow();

  // Ends the request with CANCELLED now if it is still queued, for a lane or for its check. If it
  // runs, tells it to stop (WorkItem::stop); it then ends with CANCELLED.
  void Cancel(uint64_t id);

  // From now on Submit refuses with UNAVAILABLE; accepted requests continue. Thread-safe, and so is
  // the next; of two at once either may be the last.
  void Drain();
  // Submit accepts again. Not after Abort or Stop.
  void Undrain();
  // Waits until every accepted request has ended, or until `until`. Returns whether all have.
  bool WaitIdle(TimePoint until) const;
  // Ends all requests that are queued, for a lane or a check, with UNAVAILABLE. Tells those that
  // run to stop; they then end with UNAVAILABLE too. Exception: an answer that only the server
  // wanted checked is sent unchecked. Call after Drain.
  void Abort();
  // The requests that run or are being checked.
  std::vector<BusyRequest> Running() const;
  // Ends queued requests with UNAVAILABLE, waits for running batches and joins all threads. The
  // caller must make sure that none of the calls above runs or is made later.
  void Stop();

  bool draining() const { return draining_.load(std::memory_order_acquire); }
  int64_t inflight() const { return inflight_.load(std::memory_order_acquire); }
  // When a client that was refused with `code` should retry, estimated from the current state.
  int64_t RetryAfterMs(Code code) const;

  struct DeviceState {
    DeviceInfo info;
    int lanes = 0;
    bool healthy = true;
    int64_t queued = 0;              // waiting requests
    double outstanding_batches = 0;  // cost of waiting and running requests, in full batches
    Duration busy{0};                // of all lanes together, since the start
    DeviceMemoryUse memory;
  };
  std::vector<DeviceState> Devices() const;
  // Whether any device can still answer.
  bool healthy() const;
  HostPool& host_pool() { return *host_pool_; }
  // In the order of the devices. They live as long as the engine.
  std::vector<Backend*> backends() const;
  const StagingBudget& staging() const { return stager_->budget(); }
  // The pool's allocator. It lives as long as the engine.
  HostAllocator& host_allocator() { return *host_allocator_; }
  const EngineOptions& options() const { return options_; }
  // The largest kernel cost of one request on that device; infinite: no bound.
  double RequestCostMax(int device) const { return cost_max_[device]; }

  // Called on a checker thread for each request whose check failed, before its answer is sent.
  // Set before the first Submit.
  void OnCheckFailed(std::function<void(const Request&)> hook);
  // Called once a device is lost, before the batch that detected it ends, on a completion thread or
  // inside Submit.
  // Set before the first Submit.
  void OnDeviceLost(std::function<void(const DeviceInfo&)> hook);

 private:
  Engine(const EngineOptions& options, Metrics& metrics, const Clock& clock);
  // In `room` if any is lost.
  std::span<const PlaceableDevice> PlaceableDevices(std::vector<PlaceableDevice>& room) const;
  // A lost device stays lost, so a changed count means that one was lost since the last call.
  int64_t lost_devices() const;
  Status CheckSubmit(const Request& request) const;
  // Decides whether the answer will be checked, and if so takes its place in the checker.
  Status PlanCheck(Request& request);
  // Returns the device that has a copy of the request's input, if it is one of them and the copy is
  // good, else the router's choice.
  size_t Reserve(Request& request, std::span<const Candidate> candidates);
  Status Push(std::unique_ptr<Request>& request);
  static void Choose(const Candidate& candidate, Request& request);
  // The steps of a request's end: its batch has left the lane, and it may have to be checked; it
  // has been checked; it is answered.
  void BatchDone(CompletedBatch batch);
  void CheckDone(std::unique_ptr<Request> request);
  void EndRequest(std::unique_ptr<Request> request);

  const EngineOptions options_;
  const Batcher batcher_;  // what requests cost
  Metrics& metrics_;
  const Clock& clock_;
  std::atomic<bool> draining_{false};
  bool stopped_ = false;
  std::atomic<int64_t> inflight_{0};
  std::vector<std::unique_ptr<Backend>> backends_;
  HostAllocator* host_allocator_ = nullptr;  // of one of the backends
  std::unique_ptr<HostPool> host_pool_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Stager> stager_;
  std::unique_ptr<Checker> checker_;
  std::unique_ptr<CompletionThreads> completion_;
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
  std::vector<double> cost_max_;                // kernel cost of one request, by device
  std::vector<PlaceableDevice> all_placeable_;  // while none is lost
  std::function<void(const Request&)> on_check_failed_;
  std::function<void(const DeviceInfo&)> on_device_lost_;
  Mutex lost_mutex_;
  std::set<int> lost_ ATTEND_GUARDED_BY(lost_mutex_);
};

}  // namespace attend
