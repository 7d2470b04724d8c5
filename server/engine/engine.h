// SPDX-License-Identifier: Apache-2.0
//
// The server without its wire: devices, queues, schedulers, lanes, checks. gRPC threads call
// Admit, Submit and Cancel, which wait for nothing, but that Submit may start a small request, look
// for its end for a moment and answer it (device_worker.h).

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
#include "server/split/splitter.h"
#include "server/upload/staging.h"
#include "server/upload/upload_run.h"
#include "server/util/clock.h"

namespace attend {

struct EngineOptions {
  DeviceWorkerOptions worker;                      // of every device
  Tenants tenants;                                 // who shares it
  int64_t memory_budget_bytes = int64_t{4} << 30;  // tensor bytes held at once
  // Kernel cost (kernels/contract/cost.h) of one request; 0: no bound. Nothing: what the device
  // that computes it works off in ten minutes.
  std::optional<double> request_cost_max;
  CheckerOptions checker;
  int completion_threads = 2;
  double split_flops_min = 0;  // larger requests are split over devices that are alike; 0: none
  StagingOptions staging;
};

// What a request was given before its bytes were placed.
struct Admission {
  HostBlock input;
  HostBlock output;
  Placement placement;  // its candidates only
};

class Engine {
 public:
  // `backends` must not be empty. Lanes are made here; a device that can't make its lanes is an
  // error. `metrics` and `clock` must outlive the engine.
  static Result<std::unique_ptr<Engine>> Make(std::vector<std::unique_ptr<Backend>> backends,
                                              const EngineOptions& options, Metrics& metrics,
                                              const Clock& clock);
  ~Engine();  // Stop() first, if not done
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes host memory for a request that some healthy device can run; `pinned`, unless it is kHost,
  // is the only one that may. Refusals change nothing: UNIMPLEMENTED or INVALID_ARGUMENT (Select's
  // reason), RESOURCE_EXHAUSTED (memory), UNAVAILABLE (draining, no healthy device).
  Result<Admission> Admit(const Problem& problem, std::string_view kernel, int64_t input_bytes,
                          int64_t output_bytes, int pinned = SharedRegion::kHost);

  // Decides where and how an admitted request runs (placement.h), before its tensors' bytes are
  // placed: its attention's arrays have their values, and its spans are set. Refuses as Admit does,
  // and with INVALID_ARGUMENT if it costs too much (request_cost_max). Submit does this for a
  // request that lacks it, and again if a device was lost since.
  Status Place(Request& request) const;

  // Gives a placed request whose bytes are still to come a staging (staging.h) on the device that
  // would run it now, if it is large enough, will not be split, and there is one to be had. If that
  // device computes it in parts of which some can be begun before others' bytes have come, the
  // staging also gets a run (upload_run.h). The attention's pointers lead into the input block, and
  // `tensors` are as Stager::Stage wants them. Not on gRPC's threads.
  void Stage(Request& request, std::span<const HostSpan> tensors);

  // Of the devices of its placement, chooses the one with the least outstanding cost (router.h):
  // now, as between Admit and here a client may have taken seconds to send. A request with shards
  // goes to several (splitter.h). Where there is a staging whose copy is good, its device comes
  // first.
  // Takes `request` if and only if OK; it then ends by one call of its responder, which may come
  // before the return if the request may_end_in_submit. Else
  // RESOURCE_EXHAUSTED (every queue full, or the checker's), UNAVAILABLE (draining, no healthy
  // device), DEADLINE_EXCEEDED (already past), or what Admit says where the devices that could are
  // lost. May throw std::bad_alloc, and then has not taken it either.
  Status Submit(std::unique_ptr<Request>& request);

  // If the request is still queued, for a lane or for its check, ends it with CANCELLED now. What
  // runs of it is told to stop (WorkItem::stop), and then ends so.
  void Cancel(uint64_t id);

  // From now on Admit and Submit refuse with UNAVAILABLE; what was accepted goes on.
  void Drain();
  // Waits until nothing accepted is unfinished, nor what of an upload was begun, or `until`. True
  // if idle.
  bool WaitIdle(TimePoint until) const;
  // Ends what is still queued, for a lane or a check, with UNAVAILABLE, and tells what runs to
  // stop, which then ends so; but an answer that the server alone wanted checked leaves unchecked.
  // After Drain.
  void Abort();
  // What runs or is being checked.
  std::vector<BusyRequest> Running() const;
  // Ends what is still queued with UNAVAILABLE, waits for running batches, joins all threads. The
  // caller has made sure that no call above runs or comes any more.
  void Stop();

  bool draining() const { return draining_.load(std::memory_order_acquire); }
  int64_t inflight() const { return inflight_.load(std::memory_order_acquire); }
  // Parts of uploads that are queued or run, whether their wholes are in flight or not.
  int64_t upload_parts() const { return upload_parts_.load(std::memory_order_acquire); }
  // When a client that was refused with `code` should try again, from the present state.
  int64_t RetryAfterMs(Code code) const;

  struct DeviceState {
    DeviceInfo info;
    int lanes = 0;
    bool healthy = true;
    int64_t queued = 0;              // requests that wait
    double outstanding_batches = 0;  // cost of what waits and runs, in full batches
    DeviceMemoryUse memory;
  };
  std::vector<DeviceState> Devices() const;
  // Whether any device can still answer.
  bool healthy() const;
  HostPool& host_pool() { return *host_pool_; }
  // In the order of the devices; they live as long as the engine.
  std::vector<Backend*> backends() const;
  const StagingBudget& staging() const { return stager_->budget(); }
  // Of the pool; lives as long as the engine.
  HostAllocator& host_allocator() { return *host_allocator_; }
  const EngineOptions& options() const { return options_; }
  // Kernel cost of one request on that device; infinite: no bound.
  double RequestCostMax(int device) const { return cost_max_[device]; }

  // Called on a checker thread for each request whose check failed, before its answer leaves.
  // Set before the first Submit.
  void OnCheckFailed(std::function<void(const Request&)> hook);
  // Called once a device is lost, before the batch that found it ends, on a completion thread or
  // inside Submit.
  // Set before the first Submit.
  void OnDeviceLost(std::function<void(const DeviceInfo&)> hook);

 private:
  Engine(const EngineOptions& options, Metrics& metrics, const Clock& clock);
  void MakeSplitter();
  // As many consecutive ids for parts, the first of them.
  uint64_t TakePartIds(size_t count) {
    return next_part_id_.fetch_add(count, std::memory_order_relaxed);
  }
  std::vector<PlaceableDevice> PlaceableDevices() const;
  // A device that is lost stays lost, so this says whether any was lost since it was last asked.
  int64_t lost_devices() const;
  Status CheckSubmit(const Request& request) const;
  // Whether the request's answer will be checked, and has its place with the checker.
  Status PlanCheck(Request& request);
  // Null: there are no parts, or no memory for their small blocks.
  std::shared_ptr<UploadRun> MakeUploadRun(Request& request);
  void FinishStaging(Request& request);
  // Whether the request has parts that were begun: then it is theirs, and ends with them.
  bool CompleteUpload(std::unique_ptr<Request>& request);
  // The device of the request's staging, if it has one, else the router's choice.
  size_t Reserve(Request& request, std::span<const Candidate> candidates);
  Status Route(std::unique_ptr<Request>& request);
  // Split, if it is large, or whole.
  Status PushToAny(std::unique_ptr<Request>& request);
  Status PushToOne(std::unique_ptr<Request>& request);
  Status PushPart(std::unique_ptr<Request>& part);
  std::vector<SplitDevice> SplitDevices(const Request& request) const;
  void FinishBatch(CompletedBatch batch);
  // Checks the answer first, if it is to be.
  void FinishRun(std::unique_ptr<Request> request);
  void FinishChecked(std::unique_ptr<Request> request);
  void FinishOne(std::unique_ptr<Request> request);

  const EngineOptions options_;
  const Batcher batcher_;  // what requests cost
  Metrics& metrics_;
  const Clock& clock_;
  std::atomic<bool> draining_{false};
  bool stopped_ = false;
  std::atomic<int64_t> inflight_{0};
  std::atomic<uint64_t> next_part_id_;
  std::atomic<int64_t> upload_parts_{0};
  std::vector<std::unique_ptr<Backend>> backends_;
  HostAllocator* host_allocator_ = nullptr;  // of one of the backends
  std::unique_ptr<HostPool> host_pool_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Stager> stager_;
  std::unique_ptr<Splitter> splitter_;
  std::unique_ptr<Checker> checker_;
  std::unique_ptr<CompletionThreads> completion_;
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
  std::vector<double> cost_max_;  // kernel cost of one request, by device
  std::function<void(const Request&)> on_check_failed_;
  std::function<void(const DeviceInfo&)> on_device_lost_;
  Mutex lost_mutex_;
  std::set<int> lost_ ATTEND_GUARDED_BY(lost_mutex_);
};

}  // namespace attend
