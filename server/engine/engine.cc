// SPDX-License-Identifier: Apache-2.0
//
// Ownership: a request has one owner at a time (queue, lane, completion thread, checker, responder)
// and moves between them as a unique_ptr. Every accepted request reaches EndRequest exactly once,
// which returns its place in the checker, its sources and its count in inflight_; its cost was
// returned to the router when it left its device.
//
// A device may be lost after a request's candidates were found. It then refuses the request, and
// the others remain: a lost device never comes back, so no new candidate can appear.

#include "server/engine/engine.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "kernels/contract/cost.h"
#include "kernels/util/trace_range.h"
#include "server/engine/least_refusal.h"
#include "server/util/rejection.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

// Maximum kernel cost of one request on the device; infinite: unbounded.
double CostMax(const EngineOptions& options, const DeviceInfo& info) {
  const double max =
      options.request_cost_max.value_or(thresholds::kRequestSecondsMax * CostPerSecond(info));
  return max > 0 ? max : std::numeric_limits<double>::infinity();
}

}  // namespace

Engine::Engine(const EngineOptions& options, Metrics& metrics, const Clock& clock)
    : options_(options), batcher_(options.worker.batcher), metrics_(metrics), clock_(clock) {}

Result<std::unique_ptr<Engine>> Engine::Make(std::vector<std::unique_ptr<Backend>> backends,
                                             const EngineOptions& options, Metrics& metrics,
                                             const Clock& clock) {
  std::unique_ptr<Engine> engine(new Engine(options, metrics, clock));
  engine->backends_ = std::move(backends);
  // Any GPU's page-locked memory serves all GPUs, and the CPU reads it at full speed.
  HostAllocator* allocator = &engine->backends_.front()->host_allocator();
  for (const auto& backend : engine->backends_) {
    if (backend->info().kind == DeviceKind::kCuda) allocator = &backend->host_allocator();
  }
  engine->host_allocator_ = allocator;
  Result<std::unique_ptr<HostPool>> pool =
      HostPool::Make(*allocator, options.memory_budget_bytes, options.tenants.weights());
  if (!pool.ok()) {
    return Status(pool.status().code(),
                  "cannot allocate the memory budget: " + pool.status().message());
  }
  engine->host_pool_ = std::move(*pool);
  engine->checker_ = std::make_unique<Checker>(
      options.checker, options.tenants.weights(), clock, *engine->host_pool_,
      [raw = engine.get()](std::unique_ptr<Request> request) {
        raw->CheckDone(std::move(request));
      });
  engine->completion_ = std::make_unique<CompletionThreads>(
      options.completion_threads,
      [raw = engine.get()](CompletedBatch batch) { raw->BatchDone(std::move(batch)); });
  std::vector<Metrics::Device> devices;
  std::vector<DeviceInfo> infos;
  for (const auto& backend : engine->backends_) {
    devices.push_back({backend->info().name, std::max(1, options.worker.lanes)});
    infos.push_back(backend->info());
  }
  engine->router_ = std::make_unique<Router>(infos);
  engine->stager_ = std::make_unique<Stager>(options.staging, engine->backends_, *engine->router_);
  metrics.AddDevices(devices, options.tenants.list());
  for (size_t i = 0; i < engine->backends_.size(); ++i) {
    Result<std::unique_ptr<DeviceWorker>> worker =
        DeviceWorker::Make(static_cast<int>(i), *engine->backends_[i], options.worker,
                           options.tenants.weights(), metrics, clock, *engine->completion_,
                           [raw = engine.get()](std::unique_ptr<Request> request) {
                             raw->router_->Release(request->device, request->cost);
                             raw->EndRequest(std::move(request));
                           });
    if (!worker.ok()) return worker.status();
    engine->workers_.push_back(std::move(*worker));
    engine->cost_max_.push_back(CostMax(options, engine->backends_[i]->info()));
    engine->all_placeable_.push_back({engine->backends_[i].get(), true, engine->cost_max_[i]});
  }
  return engine;
}

Engine::~Engine() { Stop(); }

std::vector<Backend*> Engine::backends() const {
  std::vector<Backend*> backends;
  for (const auto& backend : backends_) backends.push_back(backend.get());
  return backends;
}

void Engine::OnCheckFailed(std::function<void(const Request&)> hook) {
  on_check_failed_ = std::move(hook);
}

void Engine::OnDeviceLost(std::function<void(const DeviceInfo&)> hook) {
  on_device_lost_ = std::move(hook);
}

std::span<const PlaceableDevice> Engine::PlaceableDevices(
    std::vector<PlaceableDevice>& room) const {
  const bool all_healthy = std::all_of(workers_.begin(), workers_.end(),
                                       [](const auto& worker) { return worker->healthy(); });
  if (all_healthy) return all_placeable_;
  room = all_placeable_;
  for (size_t i = 0; i < room.size(); ++i) room[i].healthy = workers_[i]->healthy();
  return room;
}

Result<Admission> Engine::Admit(const Problem& problem, std::string_view kernel,
                                int64_t input_bytes, int64_t output_bytes, int tenant, int pinned,
                                Pass pass, HostBlock input) {
  Admission admission;
  std::vector<PlaceableDevice> room;
  Result<std::vector<Candidate>> candidates =
      FindCandidates(problem, pass, kernel, pinned, PlaceableDevices(room));
  if (!candidates.ok()) return candidates.status();
  admission.placement.candidates = std::move(*candidates);
  if (input.bytes() != input_bytes) {
    Result<HostBlock> taken = host_pool_->Take(tenant, input_bytes);
    if (!taken.ok()) return taken.status();
    input = std::move(*taken);
  }
  Result<HostBlock> output = host_pool_->Take(tenant, output_bytes);
  if (!output.ok()) return output.status();
  admission.input = std::move(input);
  admission.output = std::move(*output);
  return admission;
}

Status Engine::Place(Request& request) const {
  Placement& placement = request.placement;
  std::vector<PlaceableDevice> room;
  const std::span<const PlaceableDevice> devices = PlaceableDevices(room);
  if (placement.candidates.empty()) {
    Result<std::vector<Candidate>> candidates =
        FindCandidates(request.attention.problem, request.pass(), request.kernel,
                       request.source.pinned_device(), devices);
    if (!candidates.ok()) return candidates.status();
    placement.candidates = std::move(*candidates);
  }
  ATTEND_RETURN_IF_ERROR(Decide(batcher_, devices, checker_->Sampled(request.id), request));
  placement.decided = true;
  return Status();
}

bool Engine::MayCheck(const Request& request) const {
  const bool wanted = request.check != AnswerCheck::kNone || checker_->Sampled(request.id);
  return wanted && request.source.CanBeChecked();
}

Status Engine::CheckSubmit(const Request& request) const {
  if (draining()) return Draining();
  return CheckArrival(request.deadline, clock_.Now());
}

Status Engine::Submit(std::unique_ptr<Request>& request) {
  // Counted before the check, so that WaitIdle after Drain misses no request.
  metrics_.SetInflight(inflight_.fetch_add(1, std::memory_order_acq_rel) + 1);
  bool checked = false;  // holds a place in the checker
  const auto refuse = [&] {
    if (checked) checker_->Release();
    metrics_.SetInflight(inflight_.fetch_sub(1, std::memory_order_acq_rel) - 1);
  };
  try {
    Status status = CheckSubmit(*request);
    if (status.ok() && !request->placement.decided) status = Place(*request);
    if (status.ok()) {
      status = PlanCheck(*request);
      checked = status.ok() && request->to_be_checked();
    }
    if (status.ok()) status = Push(request);
    if (!status.ok()) refuse();
    return status;
  } catch (const std::bad_alloc&) {
    if (request != nullptr) refuse();
    throw;
  }
}

void Engine::Choose(const Candidate& candidate, Request& request) {
  request.device = candidate.device;
  request.selection = candidate.selection;
  request.kernel_cost = candidate.kernel_cost;
  request.in_parts = candidate.in_parts;
  request.batch_bytes = request.input_spans.bytes() + request.output_spans.bytes() +
                        candidate.selection.workspace_bytes;
}

size_t Engine::Reserve(Request& request, std::span<const Candidate> candidates) {
  DeviceCopy* const copy = request.source.copy();
  if (copy == nullptr || copy->device() < 0) return router_->Reserve(candidates);
  const auto chosen = std::find_if(candidates.begin(), candidates.end(),
                                   [&](const auto& each) { return each.device == copy->device(); });
  if (chosen == candidates.end()) {
    copy->Drop(StagingEnd::kDeviceLost);
  } else if (copy->Finish()) {
    router_->Add(chosen->device, chosen->cost);
    return static_cast<size_t>(chosen - candidates.begin());
  }
  return router_->Reserve(candidates);
}

Status Engine::Push(std::unique_ptr<Request>& request) {
  // The request's own list; replaced by a shorter copy after a refusal.
  std::span<const Candidate> candidates = request->placement.candidates;
  std::vector<Candidate> others;
  LeastRefusal refused;
  while (!candidates.empty()) {
    const size_t chosen = Reserve(*request, candidates);
    const Candidate candidate = candidates[chosen];
    Choose(candidate, *request);
    Status status;
    try {
      status = workers_[candidate.device]->Push(request);
    } catch (const std::bad_alloc&) {
      if (request != nullptr) router_->Release(candidate.device, candidate.cost);
      throw;
    }
    if (status.ok()) return status;
    // Its queue is full or too long, or it was just lost: try the next one.
    router_->Release(candidate.device, candidate.cost);
    if (DeviceCopy* const copy = request->source.copy()) {
      copy->Drop(status.code() == Code::kUnavailable ? StagingEnd::kDeviceLost
                                                     : StagingEnd::kQueueFull);
    }
    refused.Add(std::move(status), request->refusal);
    if (others.empty()) others = request->placement.candidates;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(chosen));
    candidates = others;
  }
  return refused.Tell(request->refusal);
}

void Engine::PlanNow() {
  for (const auto& worker : workers_) worker->PlanNow();
}

void Engine::Cancel(uint64_t id) {
  for (const auto& worker : workers_) worker->Cancel(id);
  checker_->Cancel(id);
}

void Engine::BatchDone(CompletedBatch batch) {
  const TraceRange range("attend: answer a batch");
  if (batch.outcome.device_lost) {
    // The lock makes other batches of the device wait for the hook.
    const MutexLock lock(lost_mutex_);
    if (lost_.insert(batch.device).second && on_device_lost_) {
      on_device_lost_(backends_[batch.device]->info());
    }
  }
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    std::unique_ptr<Request>& request = batch.requests[i];
    router_->Release(batch.device, request->cost);
    request->status = std::move(batch.outcome.statuses[i]);
    request->copy_in_ns = batch.outcome.copy_in_ns;
    request->kernel_ns = batch.outcome.kernel_ns;
    request->copy_out_ns = batch.outcome.copy_out_ns;
    if (request->status.ok()) request->source.Commit();
    if (request->status.ok() && request->to_be_checked()) {
      checker_->Post(std::move(request));
    } else {
      EndRequest(std::move(request));
    }
  }
}

void Engine::EndRequest(std::unique_ptr<Request> request) {
  Responder* const responder = request->responder;
  if (request->to_be_checked()) checker_->Release();
  request->source.End();
  responder->Finish(std::move(request));
  metrics_.SetInflight(inflight_.fetch_sub(1, std::memory_order_acq_rel) - 1);
}

void Engine::Drain() {
  draining_.store(true, std::memory_order_release);
  metrics_.SetDraining(true);
}

void Engine::Undrain() {
  draining_.store(false, std::memory_order_release);
  metrics_.SetDraining(false);
}

bool Engine::WaitIdle(TimePoint until) const {
  // Runs once per drain. Polling each millisecond saves the request path a lock and a notification.
  while (inflight() > 0) {
    if (clock_.Now() >= until) return false;
    clock_.SleepFor(std::chrono::milliseconds(1));
  }
  return true;
}

void Engine::Stop() {
  if (std::exchange(stopped_, true)) return;
  Drain();
  for (const auto& worker : workers_) worker->Stop(Unavailable("the server is stopping"));
  completion_.reset();  // the batches that the lanes delivered
  // After the completion threads, which post to it. Each check that ends calls checker_->Release().
  if (checker_ != nullptr) checker_->Stop();
  workers_.clear();  // lanes before their backends
}

int64_t Engine::RetryAfterMs(Code code) const {
  if (draining() || !healthy()) return thresholds::kRetryAfterMsDraining;
  int64_t queued = 0;
  bool full = false;
  for (const auto& worker : workers_) {
    queued += worker->queued();
    full |= worker->queue_full();
  }
  if (code == Code::kResourceExhausted && !full) {
    // The pool was short. Uploads and slow readers may hold memory while no request is queued.
    const double used = static_cast<double>(host_pool_->used_bytes()) /
                        static_cast<double>(std::max<int64_t>(1, host_pool_->budget_bytes()));
    const auto growth =
        static_cast<double>(thresholds::kRetryAfterMsMax - thresholds::kRetryAfterMsMemoryMin);
    return thresholds::kRetryAfterMsMemoryMin + static_cast<int64_t>(used * growth);
  }
  return std::clamp(queued / 8, thresholds::kRetryAfterMsMin, thresholds::kRetryAfterMsMax);
}

std::vector<Engine::DeviceState> Engine::Devices() const {
  std::vector<DeviceState> states;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const DeviceWorker& worker = *workers_[i];
    states.push_back({worker.info(), worker.lanes(), worker.healthy(), worker.queued(),
                      static_cast<double>(router_->outstanding(static_cast<int>(i))) /
                          static_cast<double>(kBatchCost),
                      worker.busy_time(), backends_[i]->memory_use()});
  }
  return states;
}

bool Engine::healthy() const {
  return std::any_of(workers_.begin(), workers_.end(),
                     [](const auto& worker) { return worker->healthy(); });
}

}  // namespace attend
