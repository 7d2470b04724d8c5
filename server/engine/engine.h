// SPDX-License-Identifier: Apache-2.0
//
// The server without its wire: devices, queues, schedulers, lanes, checks. The transport's loops
// call Admit, Submit and Cancel, which do not block. One exception: Submit may start a small
// request, poll briefly for its end and answer it (device_worker.h).

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
  DeviceWorkerOptions worker;                      // of each device
  Tenants tenants;                                 // the tenants that share the server
  int64_t memory_budget_bytes = int64_t{4} << 30;  // tensor bytes held at once
  // Maximum kernel cost (kernels/contract/cost.h) of a request; 0: unbounded. Unset: ten minutes of
  // its device.
  std::optional<double> request_cost_max;
  CheckerOptions checker;
  int completion_threads = 2;
  StagingOptions staging;
};

// Taken for a request before its bytes are placed.
struct Admission {
  HostBlock input;
  HostBlock output;
  Placement placement;  // candidates only
};

class Engine {
 public:
  // `backends` must not be empty. Makes the lanes; a device that cannot make its lanes is an error.
  // `metrics` and `clock` must outlive the engine.
  static Result<std::unique_ptr<Engine>> Make(std::vector<std::unique_ptr<Backend>> backends,
                                              const EngineOptions& options, Metrics& metrics,
                                              const Clock& clock);
  ~Engine();  // calls Stop() if needed
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Allocates `tenant`'s host memory for a request that some healthy device can run; only `pinned`
  // may run it, unless that is kAnyDevice. `input` is used if it has the right size. Refusals
  // change nothing: UNIMPLEMENTED or INVALID_ARGUMENT (Select's reason), RESOURCE_EXHAUSTED
  // (memory), UNAVAILABLE (no healthy device).
  Result<Admission> Admit(const Problem& problem, std::string_view kernel, int64_t input_bytes,
                          int64_t output_bytes, int tenant, int pinned = kAnyDevice,
                          Pass pass = Pass::kForward, HostBlock input = {});

  // Decides where and how an admitted request runs (placement.h). Call it before the tensors' bytes
  // are placed; the attention's arrays must have their values, and the spans must be set. Refuses
  // like Admit, and with INVALID_ARGUMENT if the request costs more than request_cost_max. Submit
  // calls it for a request that has not been placed.
  Status Place(Request& request) const;

  // Whether the request's answer may be checked.
  bool MayCheck(const Request& request) const;

  // Refuses a placed request that no candidate device is expected to answer before its deadline
  // (scheduler.h), so that its bytes need not be copied. Submit judges again.
  Status CheckInTime(Request& request);

  // Stager::Stage. Not on the transport's loops.
  void Stage(Request& request, std::span<const HostSpan> tensors) {
    stager_->Stage(request, tensors);
  }

  // Queues the request on the candidate with the least outstanding cost (router.h). The device is
  // chosen here, not in Admit, because a client may take seconds to send its tensors. A device with
  // a good copy of the input is tried first.
  //
  // Takes `request` if and only if OK. It then ends with exactly one call of its responder; with
  // may_end_in_submit set, possibly before Submit returns. Otherwise RESOURCE_EXHAUSTED (every
  // queue or the checker is full, or the answer would be late), UNAVAILABLE (draining, or every
  // device that could run it is lost), or DEADLINE_EXCEEDED (already past). May throw
  // std::bad_alloc; the request has not been taken then.
  Status Submit(std::unique_ptr<Request>& request);

  // Plans the requests that Submit left queued for this call (Request::planner). Requests may end
  // before it returns. Cheap if there are none.
  void PlanNow();

  // Ends the request with CANCELLED now if it waits for a lane or its check. If it runs, stops it
  // (WorkItem::stop); it then ends with CANCELLED.
  void Cancel(uint64_t id);

  // Submit refuses with UNAVAILABLE from now on; accepted requests continue. Drain and Undrain are
  // thread-safe; of two concurrent calls either may be the last.
  void Drain();
  // Submit accepts again. Not after Abort or Stop.
  void Undrain();
  // Waits until every accepted request has ended, or until `until`. Returns whether all have.
  bool WaitIdle(TimePoint until) const;
  // Ends all queued requests, for a lane or a check, with UNAVAILABLE. Stops running ones, which
  // then end with UNAVAILABLE too. Exception: an answer sampled by the server is sent unchecked.
  // Call after Drain.
  void Abort();
  // The requests that are running or being checked.
  std::vector<BusyRequest> Running() const;
  // Ends queued requests with UNAVAILABLE, waits for running batches and joins all threads. The
  // caller ensures that no other call runs or follows.
  void Stop();

  bool draining() const { return draining_.load(std::memory_order_acquire); }
  int64_t inflight() const { return inflight_.load(std::memory_order_acquire); }
  // Milliseconds after which a client refused with `code` should retry, estimated from the load
  // now.
  int64_t RetryAfterMs(Code code) const;

  struct DeviceState {
    DeviceInfo info;
    int lanes = 0;
    bool healthy = true;
    int64_t queued = 0;              // waiting requests
    double outstanding_batches = 0;  // cost of waiting and running requests, in full batches
    Duration busy{0};                // lane time since the start, summed over lanes
    DeviceMemoryUse memory;
  };
  std::vector<DeviceState> Devices() const;
  // Whether any device can still answer.
  bool healthy() const;
  HostPool& host_pool() { return *host_pool_; }
  // In device order. They live as long as the engine.
  std::vector<Backend*> backends() const;
  const StagingBudget& staging() const { return stager_->budget(); }
  // The pool's allocator. It lives as long as the engine.
  HostAllocator& host_allocator() { return *host_allocator_; }
  const EngineOptions& options() const { return options_; }
  // Maximum kernel cost of one request on the device; infinite: unbounded.
  double RequestCostMax(int device) const { return cost_max_[device]; }

  // Called on a checker thread for each failed check, before its answer is sent. Set before the
  // first Submit.
  void OnCheckFailed(std::function<void(const Request&)> hook);
  // Called once per lost device, before the batch that detected the loss ends, on a completion
  // thread or inside Submit. Set before the first Submit.
  void OnDeviceLost(std::function<void(const DeviceInfo&)> hook);

 private:
  Engine(const EngineOptions& options, Metrics& metrics, const Clock& clock);
  // The devices and their health. `room` is the storage if a device is lost.
  std::span<const PlaceableDevice> PlaceableDevices(std::vector<PlaceableDevice>& room) const;
  Status CheckSubmit(const Request& request) const;
  // Decides whether the answer will be checked; if so, takes a place in the checker.
  Status PlanCheck(Request& request);
  // Returns the candidate with a good copy of the request's input, if any, else the router's
  // choice.
  size_t Reserve(Request& request, std::span<const Candidate> candidates);
  Status Push(std::unique_ptr<Request>& request);
  static void Choose(const Candidate& candidate, Request& request);
  // A request's last steps: its batch has left the lane; its check is done; it is answered.
  void BatchDone(CompletedBatch batch);
  void CheckDone(std::unique_ptr<Request> request);
  void EndRequest(std::unique_ptr<Request> request);

  const EngineOptions options_;
  const Batcher batcher_;  // for the cost of requests
  Metrics& metrics_;
  const Clock& clock_;
  std::atomic<bool> draining_{false};
  bool stopped_ = false;
  std::atomic<int64_t> inflight_{0};
  std::vector<std::unique_ptr<Backend>> backends_;
  HostAllocator* host_allocator_ = nullptr;  // owned by a backend
  std::unique_ptr<HostPool> host_pool_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Stager> stager_;
  std::unique_ptr<Checker> checker_;
  std::unique_ptr<CompletionThreads> completion_;
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
  std::vector<double> cost_max_;                // kernel cost of one request, by device
  std::vector<PlaceableDevice> all_placeable_;  // used while no device is lost
  std::function<void(const Request&)> on_check_failed_;
  std::function<void(const DeviceInfo&)> on_device_lost_;
  Mutex lost_mutex_;
  std::set<int> lost_ ATTEND_GUARDED_BY(lost_mutex_);
};

}  // namespace attend
