// SPDX-License-Identifier: Apache-2.0

#include "server/metrics/metrics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>

#include "server/metrics/code_counters.h"
#include "server/metrics/device_metrics.h"
#include "server/metrics/make_family.h"
#include "server/metrics/tenant_metrics.h"

namespace attend {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

// The rejections counted here: kInvalid and later.
constexpr auto kRejectionFirst = static_cast<size_t>(Rejection::kInvalid);
constexpr std::array<std::string_view, kRejectionCount - kRejectionFirst> kRejectionNames = {
    "invalid",      "unimplemented",   "memory",         "queue_full",     "checks",
    "draining",     "deadline_passed", "too_large",      "unknown_method", "sessions",
    "regions",      "no_credentials",  "unknown_caller", "expired",        "cleartext_token",
    "other_tenant", "no_scope",        "tenant_limit",
    "late"  // would miss its deadline
};

constexpr std::array<std::string_view, kCheckResultCount> kCheckResultNames = {
    "ok", "failed", "skipped", "refused", "inputs", "undecided"};

constexpr std::array<std::string_view, kConnectionRefusalCount> kConnectionRefusalNames = {
    "limit",     "peer_limit", "silent",   "descriptors", "frames",  "tls",
    "plaintext", "user",       "stranger", "stalled",     "messages"};

enum Phase { kReceive, kUpload, kQueue, kCopyIn, kKernel, kCopyOut, kCheck, kTotal, kPhaseCount };
constexpr std::array<const char*, kPhaseCount> kPhaseNames = {
    "receive", "upload", "queue", "copy_in", "kernel", "copy_out", "check", "total"};

// Caps ratios that are not finite or have a bound of 0: the histogram's sum must stay a number.
constexpr double kErrorRatioMax = 1e6;

Histogram::BucketBoundaries DurationBuckets() {
  return {1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2,
          5e-2, 0.1,    0.25, 0.5,  1,      2.5,  5,    10,     30,   60};
}

double ErrorRatio(const RowsReport& report) {
  if (report.max_abs_error == 0) return 0;
  const double ratio = report.max_abs_error / report.bound;
  return ratio <= kErrorRatioMax ? ratio : kErrorRatioMax;  // also for NaN
}

CheckResult ResultOf(const RowsReport& report) {
  if (report.ok) return CheckResult::kOk;
  if (report.undecided) return CheckResult::kUndecided;
  return report.of_inputs ? CheckResult::kInputs : CheckResult::kFailed;
}

// A late request whose deadline was less than this after its arrival counts in no objective.
constexpr Duration kShortDeadline = std::chrono::milliseconds(10);

bool IsLate(const Request& request) {
  return request.status.code() == Code::kDeadlineExceeded ||
         RejectionOf(request.status) == Rejection::kLate;
}

bool HadShortDeadline(const Request& request) {
  return request.deadline != kNever && request.deadline - request.received < kShortDeadline;
}

// The outcome of a request with a deadline, where the deadline decided it.
enum DeadlineOutcome : size_t { kAnswered, kRefused, kDropped, kStopped, kLate };
constexpr std::array<std::string_view, 5> kDeadlineOutcomeNames = {"answered", "refused", "dropped",
                                                                   "stopped", "late"};

std::optional<DeadlineOutcome> DeadlineOutcomeOf(const Request& request) {
  if (request.deadline == kNever || HadShortDeadline(request)) return std::nullopt;
  if (request.status.ok()) return request.completed > request.deadline ? kLate : kAnswered;
  if (!IsLate(request)) return std::nullopt;
  if (request.started != TimePoint()) return kStopped;
  return request.enqueued != TimePoint() ? kDropped : kRefused;
}

// Whether the client cancelled or disconnected before any work was done. A chunked upload is paced
// by its client and may be abandoned half way, so it counts only if its header was not accepted.
bool CancelledEarly(const Request& request) {
  if (request.status.code() != Code::kCancelled || request.enqueued != TimePoint()) return false;
  return request.transport != Transport::kChunked || request.placement.candidates.empty();
}

}  // namespace

std::string_view ConnectionRefusalName(ConnectionRefusal reason) {
  return kConnectionRefusalNames[static_cast<size_t>(reason)];
}

struct Metrics::Families {
  explicit Families(const std::string& version);
  // Records the answer under the devices that computed it.
  void RecordAnswer(const Request& request) const;

  const std::shared_ptr<Registry> shared_registry = std::make_shared<Registry>();
  Registry& registry = *shared_registry;
  const CodeCounters requests{registry, "attend_requests_total",
                              "Requests that ended, by gRPC status code"};
  const CodeCounters backward_requests{registry, "attend_backward_requests_total",
                                       "Requests for gradients that ended, by gRPC status code"};
  const CodeCounters objective_requests{
      registry, "attend_objective_requests_total",
      "Requests that ended, by gRPC status code, except those that arrived with too little time "
      "left or were refused by a tenant limit"};
  Counter& short_deadlines =
      MakeCounter(registry, "attend_short_deadlines_total",
                  "Late requests that had less than 10 ms left when they arrived");
  Counter& early_cancellations =
      MakeCounter(registry, "attend_early_cancellations_total",
                  "Requests that ended with CANCELLED before they were accepted; for chunked "
                  "requests, before their header was");
  const std::array<Counter*, kRejectionNames.size()> rejections = MakeCounters(
      registry, "attend_rejected_requests_total",
      "Requests refused before they were accepted, by reason", "reason", kRejectionNames);
  const std::array<Counter*, kDeadlineOutcomeNames.size()> deadlines = MakeCounters(
      registry, "attend_deadline_requests_total",
      "Requests with a deadline, by outcome: answered in time, or where they were found to be late",
      "outcome", kDeadlineOutcomeNames);
  std::array<Histogram*, kPhaseCount> phases{};
  std::array<Counter*, kTransportCount> bytes_in = MakeTransportCounters("in");
  std::array<Counter*, kTransportCount> bytes_out = MakeTransportCounters("out");
  Counter& bytes_in_place = MakeCounter(
      registry, "attend_read_in_place_bytes_total",
      "Tensor bytes of answered requests that a device read where their messages arrived");
  std::array<std::array<Counter*, kTransportCount>, kCheckResultCount> checks{};
  Counter& unread = MakeCounter(registry, "attend_unread_calls_total",
                                "Calls ended because their clients did not read the answer");
  Counter& check_rows_unjudged =
      MakeCounter(registry, "attend_reference_check_rows_unjudged_total",
                  "Rows of gradients that the double-precision reference could not judge");
  Counter& check_rows = MakeCounter(registry, "attend_reference_check_rows_total",
                                    "Output rows compared with the reference");
  Histogram& check_error =
      MakeHistogram(registry, "attend_reference_check_error_ratio",
                    "Largest absolute error of a checked answer, relative to its bound",
                    {0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2, 10, 100, 1000});
  Gauge& host_used =
      MakeGauge(registry, "attend_host_memory_used_bytes", "Host tensor memory held by requests");
  Gauge& host_largest_free = MakeGauge(registry, "attend_host_memory_largest_free_bytes",
                                       "Largest free block of host tensor memory");
  Gauge& host_budget =
      MakeGauge(registry, "attend_host_memory_budget_bytes", "Limit on host tensor memory");
  const std::array<Counter*, kConnectionRefusalCount> connection_refusals = MakeCounters(
      registry, "attend_connections_refused_total", "Connections that the server closed, by reason",
      "reason", kConnectionRefusalNames);
  Counter& accept_errors = MakeCounter(registry, "attend_accept_errors_total",
                                       "Times that the system failed to accept a connection");
  Gauge& connections =
      MakeGauge(registry, "attend_connections", "Connections to the gRPC addresses");
  Gauge& connections_limit =
      MakeGauge(registry, "attend_connections_limit", "Limit on attend_connections");
  Gauge& accepting = MakeGauge(registry, "attend_accepting",
                               "0 once connections could not be accepted for a second or longer");
  Gauge& inflight =
      MakeGauge(registry, "attend_inflight_requests", "Requests accepted and not yet answered");
  Gauge& unanswered =
      MakeGauge(registry, "attend_heartbeat_unanswered_seconds",
                "How long the call that the server sends itself each second has been unanswered");
  Gauge& left_out = MakeGauge(registry, "attend_devices_left_out",
                              "GPUs that --device auto found but could not use at start");
  const std::array<Counter*, 2> tokens_reloads = MakeCounters(
      registry, "attend_tokens_reloads_total", "Reloads of the changed file of --tokens, by result",
      "result", std::array<std::string_view, 2>{"failed", "ok"});
  prometheus::Family<Gauge>& reload_failed = ReloadFailedFamily(registry);
  Gauge& draining = MakeGauge(registry, "attend_draining", "1 once the server refuses new work");
  Counter& log_lines_suppressed = MakeCounter(registry, "attend_log_lines_suppressed_total",
                                              "Warnings and errors that --log-rate suppressed");
  std::vector<TenantSeries> tenants;
  std::vector<DeviceSeries> devices;

 private:
  std::array<Counter*, kTransportCount> MakeTransportCounters(const char* direction) {
    return MakeCounters(registry, "attend_transport_bytes_total",
                        "Bytes of answered requests and of their answers, by transport",
                        "transport", kTransportNames, {{"direction", direction}});
  }
};

Metrics::Families::Families(const std::string& version) {
  for (int i = 0; i < kPhaseCount; ++i) {
    phases[i] =
        &MakeHistogram(registry, "attend_phase_duration_seconds",
                       "Time that answered requests spent in each phase; upload and total contain "
                       "the time that clients of AttendChunked took to send",
                       DurationBuckets(), {{"phase", kPhaseNames[i]}});
  }
  for (int result = 0; result < kCheckResultCount; ++result) {
    checks[result] = MakeCounters(
        registry, "attend_reference_checks_total",
        "Answers compared with the double-precision reference, by result and transport",
        "transport", kTransportNames, {{"result", std::string(kCheckResultNames[result])}});
  }
  accepting.Set(1);
  MakeGauge(registry, "attend_build_info", "Always 1; the labels describe the build",
            {{"version", version}, {"compiler", "gcc " __VERSION__}, {"cuda", CudaBuildVersion()}})
      .Set(1);
  // Prometheus compares it with its scrape times, so it is wall-clock time.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  MakeGauge(registry, "process_start_time_seconds", "Start of the process, seconds since 1970")
      .Set(std::chrono::duration<double>(now).count());
}

void Metrics::Families::RecordAnswer(const Request& request) const {
  if (request.device < 0 || request.device >= static_cast<int>(devices.size())) return;
  const DeviceSeries& device = devices[request.device];
  const size_t kernel = static_cast<size_t>(request.selection.kernel);
  const size_t dtype = static_cast<size_t>(request.attention.problem.dtype) - 1;
  if (device.flops[kernel][dtype] == nullptr) return;
  device.kernel_requests[kernel][dtype]->Increment();
  device.flops[kernel][dtype]->Increment(request.flops);
  const auto fallback = static_cast<size_t>(request.selection.fallback);
  if (fallback == 0) return;
  device.fallback_requests[fallback]->Increment();
  device.fallback_kernel_seconds[fallback]->Increment(
      Seconds(request.kernel_ns) /
      static_cast<double>(std::max<int64_t>(1, request.batch_requests)));
}

Metrics::Metrics(const std::string& version) : families_(std::make_unique<Families>(version)) {}
Metrics::~Metrics() = default;

void Metrics::AddDevices(const std::vector<Device>& devices, const std::vector<Tenant>& tenants) {
  Families& f = *families_;
  for (const Tenant& tenant : tenants) f.tenants.emplace_back(f.registry, tenant.name);
  for (const Device& device : devices) {
    f.devices.emplace_back(f.registry, device.name, device.lanes, tenants);
  }
}

std::shared_ptr<Registry> Metrics::registry() const { return families_->shared_registry; }

int64_t Metrics::answered() const {
  return static_cast<int64_t>(families_->requests.value(Code::kOk));
}

void Metrics::RecordFinished(const Request& request, int64_t total_ns, int64_t response_bytes) {
  Families& f = *families_;
  f.requests.Count(request.status.code());
  if (request.asked == Pass::kBackward) f.backward_requests.Count(request.status.code());
  if (const auto outcome = DeadlineOutcomeOf(request)) f.deadlines[*outcome]->Increment();
  f.tenants[request.tenant].RecordFinished(request, total_ns);
  const bool in_short = IsLate(request) && HadShortDeadline(request);
  if (in_short) f.short_deadlines.Increment();
  if (!in_short && !LimitedByTenant(request)) f.objective_requests.Count(request.status.code());
  if (CancelledEarly(request)) f.early_cancellations.Increment();
  if (request.enqueued == TimePoint()) RecordRejection(RejectionOf(request.status));
  if (request.report.has_value()) {
    RecordCheck(ResultOf(*request.report), request.transport);
    f.check_rows.Increment(static_cast<double>(request.report->rows_checked));
    f.check_rows_unjudged.Increment(static_cast<double>(request.report->rows_unjudged));
    f.check_error.Observe(ErrorRatio(*request.report));
    f.phases[kCheck]->Observe(Seconds(request.check_ns));
  }
  if (!request.status.ok()) return;
  // From a chunked request's header to its last byte the client sets the pace.
  const Phase receive = request.transport == Transport::kChunked ? kUpload : kReceive;
  f.phases[receive]->Observe(Seconds(NanosecondsBetween(request.received, request.enqueued)));
  f.phases[kQueue]->Observe(Seconds(NanosecondsBetween(request.enqueued, request.started)));
  f.phases[kCopyIn]->Observe(Seconds(request.copy_in_ns));
  f.phases[kKernel]->Observe(Seconds(request.kernel_ns));
  f.phases[kCopyOut]->Observe(Seconds(request.copy_out_ns));
  f.phases[kTotal]->Observe(Seconds(total_ns));
  // Tensors in messages count as inline or chunked, even if others are in shared memory.
  const Transport messages =
      request.transport == Transport::kChunked ? Transport::kChunked : Transport::kInline;
  const size_t transport = static_cast<size_t>(messages);
  f.bytes_in[transport]->Increment(static_cast<double>(request.message_bytes));
  f.bytes_out[transport]->Increment(static_cast<double>(response_bytes));
  if (const GatheredInput* const input = request.source.gathered()) {
    f.bytes_in_place.Increment(static_cast<double>(input->bytes()));
  }
  const auto shm = static_cast<size_t>(Transport::kSharedMemory);
  f.bytes_in[shm]->Increment(static_cast<double>(request.file_bytes.input));
  f.bytes_out[shm]->Increment(static_cast<double>(request.file_bytes.output));
  if (const SharedTensors* const shared = request.source.shared()) {
    for (const Transport way : {Transport::kSharedMemory, Transport::kCudaIpc}) {
      const size_t n = static_cast<size_t>(way);
      f.bytes_in[n]->Increment(static_cast<double>(shared->BytesIn(way)));
      f.bytes_out[n]->Increment(static_cast<double>(shared->BytesOut(way)));
    }
  }
  f.RecordAnswer(request);
}

void Metrics::RecordSmallCall(int tenant, Code code) {
  families_->tenants[tenant].RecordSmallCall(code);
}

void Metrics::RecordRejection(Rejection reason) {
  const auto index = static_cast<size_t>(reason);
  if (index >= kRejectionFirst) families_->rejections[index - kRejectionFirst]->Increment();
}

void Metrics::RecordBatch(int device, int64_t requests, double flops, BatchClosed closed) {
  const DeviceSeries& series = families_->devices[device];
  series.batch_requests.Observe(static_cast<double>(requests));
  series.batch_flops.Observe(flops);
  series.batches[static_cast<size_t>(closed)]->Increment();
}

void Metrics::RecordOutcome(int device, const BatchOutcome& outcome) {
  families_->devices[device].Record(outcome);
}

void Metrics::RecordCheck(CheckResult result, Transport transport) {
  families_->checks[static_cast<size_t>(result)][static_cast<size_t>(transport)]->Increment();
}

void Metrics::RecordUnread() { families_->unread.Increment(); }

void Metrics::SetQueue(int device, int64_t requests) {
  families_->devices[device].queue.Set(static_cast<double>(requests));
}

void Metrics::SetTenantQueue(int device, int tenant, int64_t requests) {
  families_->devices[device].tenant_queue[tenant]->Set(static_cast<double>(requests));
}

void Metrics::SetBacklog(int device, Duration expected) {
  families_->devices[device].backlog.Set(std::chrono::duration<double>(expected).count());
}

void Metrics::SetLanesBusy(int device, int64_t lanes) {
  families_->devices[device].lanes_busy.Set(static_cast<double>(lanes));
}

void Metrics::SetOutstanding(int device, double batches) {
  families_->devices[device].outstanding.Set(batches);
}

void Metrics::SetDeviceHealthy(int device, bool healthy) {
  families_->devices[device].healthy.Set(healthy ? 1 : 0);
}

void Metrics::SetDeviceMemory(int device, const DeviceMemoryUse& memory) {
  families_->devices[device].memory_used.Set(static_cast<double>(memory.used_bytes));
  families_->devices[device].memory_limit.Set(static_cast<double>(memory.limit_bytes));
}

void Metrics::SetHostMemory(int64_t used_bytes, int64_t largest_free_bytes, int64_t budget_bytes) {
  families_->host_used.Set(static_cast<double>(used_bytes));
  families_->host_largest_free.Set(static_cast<double>(largest_free_bytes));
  families_->host_budget.Set(static_cast<double>(budget_bytes));
}

void Metrics::RecordConnectionRefused(ConnectionRefusal reason) {
  families_->connection_refusals[static_cast<size_t>(reason)]->Increment();
}

void Metrics::RecordAcceptError() { families_->accept_errors.Increment(); }

void Metrics::SetConnections(int64_t connections, int64_t limit) {
  families_->connections.Set(static_cast<double>(connections));
  families_->connections_limit.Set(static_cast<double>(limit));
}

void Metrics::SetAccepting(bool accepting) { families_->accepting.Set(accepting ? 1 : 0); }

void Metrics::SetInflight(int64_t requests) {
  families_->inflight.Set(static_cast<double>(requests));
}
void Metrics::SetUnansweredSeconds(int seconds) { families_->unanswered.Set(seconds); }

void Metrics::RecordTokensReload(bool ok) {
  families_->tokens_reloads[ok ? 1 : 0]->Increment();
  SetReloadFailed("tokens", !ok);
}

void Metrics::SetReloadFailed(const std::string& what, bool failed) {
  families_->reload_failed.Add({{"what", what}}).Set(failed ? 1 : 0);
}

void Metrics::SetDevicesLeftOut(int devices) { families_->left_out.Set(devices); }

void Metrics::SetDraining(bool draining) { families_->draining.Set(draining ? 1 : 0); }

void Metrics::RecordLogLinesSuppressed(int64_t lines) {
  families_->log_lines_suppressed.Increment(static_cast<double>(lines));
}

}  // namespace attend
