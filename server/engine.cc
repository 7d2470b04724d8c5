// SPDX-License-Identifier: Apache-2.0

#include "server/engine.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "kernels/trace_range.h"

namespace attend {
namespace {

constexpr int64_t kRetryAfterMsMin = 5;
constexpr int64_t kRetryAfterMsMax = 1000;
constexpr int64_t kRetryAfterMsMemoryMin = 100;
constexpr int64_t kRetryAfterMsDraining = 1000;

EngineOptions WithWeights(EngineOptions options) {
  options.worker.tenant_weights = options.tenants.weights();
  return options;
}

Status DrainingStatus() { return Unavailable("the server is draining and takes no new requests"); }

}  // namespace

Engine::Engine(const EngineOptions& options, Metrics& metrics, const Clock& clock)
    : options_(WithWeights(options)), metrics_(metrics), clock_(clock) {}

Result<std::unique_ptr<Engine>> Engine::Make(std::vector<std::unique_ptr<Backend>> backends,
                                             const EngineOptions& options, Metrics& metrics,
                                             const Clock& clock) {
  std::unique_ptr<Engine> engine(new Engine(options, metrics, clock));
  engine->backends_ = std::move(backends);
  // Page-locked memory of any GPU serves all of them, and the CPU reads it as well as any other.
  HostAllocator* allocator = &engine->backends_.front()->host_allocator();
  for (const auto& backend : engine->backends_) {
    if (backend->info().kind == DeviceKind::kCuda) allocator = &backend->host_allocator();
  }
  Result<std::unique_ptr<HostPool>> pool = HostPool::Make(*allocator, options.memory_budget_bytes);
  if (!pool.ok()) {
    return Status(pool.status().code(), "taking the memory budget: " + pool.status().message());
  }
  engine->host_pool_ = std::move(*pool);
  engine->checker_ = std::make_unique<Checker>(
      options.checker, clock, [raw = engine.get()](std::unique_ptr<Request> request) {
        raw->FinishChecked(std::move(request));
      });
  engine->completion_ = std::make_unique<CompletionThread>(
      [raw = engine.get()](CompletedBatch batch) { raw->FinishBatch(std::move(batch)); });
  std::vector<Metrics::Device> devices;
  for (const auto& backend : engine->backends_) {
    devices.push_back({backend->info().name, std::max(1, options.worker.lanes)});
  }
  metrics.AddDevices(devices, options.tenants.list());
  for (size_t i = 0; i < engine->backends_.size(); ++i) {
    Result<std::unique_ptr<DeviceWorker>> worker = DeviceWorker::Make(
        static_cast<int>(i), *engine->backends_[i], engine->options_.worker, metrics, clock,
        *engine->completion_, [raw = engine.get()](std::unique_ptr<Request> request) {
          raw->FinishOne(std::move(request));
        });
    if (!worker.ok()) return worker.status();
    engine->workers_.push_back(std::move(*worker));
  }
  return engine;
}

Engine::~Engine() { Stop(); }

void Engine::OnCheckFailed(std::function<void(const Request&)> hook) {
  on_check_failed_ = std::move(hook);
}

Result<int> Engine::PickDevice(const Problem& problem, std::string_view kernel,
                               Selection& selection) const {
  int best = -1;
  double best_flops = std::numeric_limits<double>::infinity();
  Status refusal = Unavailable("no device is healthy");
  for (size_t i = 0; i < workers_.size(); ++i) {
    const DeviceWorker& worker = *workers_[i];
    if (!worker.healthy()) continue;
    const Result<Selection> selected = Select(problem, worker.info(), kernel);
    if (!selected.ok()) {
      refusal = selected.status();
      continue;
    }
    const double flops = workers_.size() == 1 ? 0 : worker.outstanding_flops();
    if (best < 0 || flops < best_flops) {
      best = static_cast<int>(i);
      best_flops = flops;
      selection = *selected;
    }
  }
  if (best < 0) return refusal;
  return best;
}

Result<Admission> Engine::Admit(const Problem& problem, std::string_view kernel,
                                int64_t input_bytes, int64_t output_bytes) {
  if (draining()) return DrainingStatus();
  Admission admission;
  const Result<int> device = PickDevice(problem, kernel, admission.selection);
  if (!device.ok()) return device.status();
  admission.device = *device;
  Result<HostBlock> input = host_pool_->Take(input_bytes);
  if (!input.ok()) return input.status();
  Result<HostBlock> output = host_pool_->Take(output_bytes);
  if (!output.ok()) return output.status();
  admission.input = std::move(*input);
  admission.output = std::move(*output);
  return admission;
}

Status Engine::Submit(std::unique_ptr<Request>& request) {
  // Counted first and looked at second, so that WaitIdle after Drain misses nobody.
  const int64_t inflight = inflight_.fetch_add(1, std::memory_order_acq_rel) + 1;
  Status status;
  if (draining()) {
    status = DrainingStatus();
  } else if (request->deadline != kNever && request->deadline <= clock_.Now()) {
    status = Status(Code::kDeadlineExceeded, "the deadline had passed when the request arrived");
  } else {
    request->flops = Flops(request->attention);
    // The kernel's workspace too, so that one that keeps its score matrix runs alone and cannot
    // make its company fail.
    request->batch_bytes = request->input_spans.bytes() + request->output_spans.bytes() +
                           request->selection.workspace_bytes;
    if (!request->check && checker_->Sampled(request->id)) {
      request->check = checker_->HasRoom();
      if (!request->check) metrics_.RecordCheckSkipped();
    }
    status = workers_[request->device]->Push(request);
  }
  if (!status.ok()) {
    inflight_.fetch_sub(1, std::memory_order_acq_rel);
    return status;
  }
  metrics_.SetInflight(inflight);
  return status;
}

void Engine::Cancel(uint64_t id, int device) {
  if (device >= 0 && device < static_cast<int>(workers_.size())) workers_[device]->Cancel(id);
}

void Engine::FinishBatch(CompletedBatch batch) {
  const TraceRange range("attend: answer a batch");
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    std::unique_ptr<Request>& request = batch.requests[i];
    request->status = std::move(batch.outcome.statuses[i]);
    request->copy_in_ns = batch.outcome.copy_in_ns;
    request->kernel_ns = batch.outcome.kernel_ns;
    request->copy_out_ns = batch.outcome.copy_out_ns;
    if (request->status.ok() && request->check) {
      checker_->Post(std::move(request));
    } else {
      FinishOne(std::move(request));
    }
  }
}

void Engine::FinishChecked(std::unique_ptr<Request> request) {
  if (request->report.has_value() && !request->report->ok && on_check_failed_)
    on_check_failed_(*request);
  FinishOne(std::move(request));
}

void Engine::FinishOne(std::unique_ptr<Request> request) {
  Responder* const responder = request->responder;
  responder->Finish(std::move(request));
  metrics_.SetInflight(inflight_.fetch_sub(1, std::memory_order_acq_rel) - 1);
}

void Engine::Drain() {
  draining_.store(true, std::memory_order_release);
  metrics_.SetDraining(true);
}

bool Engine::WaitIdle(TimePoint until) const {
  // Drain happens once in a process's life; looking every millisecond keeps the request path free
  // of a lock and a notification that it would otherwise pay for each call.
  while (inflight() > 0) {
    if (clock_.Now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void Engine::Stop() {
  if (std::exchange(stopped_, true)) return;
  Drain();
  for (const auto& worker : workers_) worker->Stop(Unavailable("the server is stopping"));
  completion_.reset();  // ends what the lanes delivered
  checker_.reset();     // ends what the completion thread sent on
  workers_.clear();     // lanes before their backends
}

int64_t Engine::RetryAfterMs(Code code) const {
  if (draining()) return kRetryAfterMsDraining;
  int64_t queued = 0;
  bool full = false;
  for (const auto& worker : workers_) {
    queued += worker->queued();
    full |= worker->queued() >= options_.worker.queue_requests_max;
  }
  if (code == Code::kResourceExhausted && !full) {
    // What lacked was memory, which uploads and slow readers may hold while nothing is queued.
    const double used = static_cast<double>(host_pool_->used_bytes()) /
                        static_cast<double>(std::max<int64_t>(1, host_pool_->budget_bytes()));
    const auto growth = static_cast<double>(kRetryAfterMsMax - kRetryAfterMsMemoryMin);
    return kRetryAfterMsMemoryMin + static_cast<int64_t>(used * growth);
  }
  return std::clamp(queued / 8, kRetryAfterMsMin, kRetryAfterMsMax);
}

std::vector<Engine::DeviceState> Engine::Devices() const {
  std::vector<DeviceState> states;
  for (const auto& worker : workers_) {
    states.push_back({worker->info(), worker->lanes(), worker->healthy()});
  }
  return states;
}

}  // namespace attend
