// SPDX-License-Identifier: Apache-2.0

#include "server/metrics/metrics.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "server/metrics/device_metrics.h"
#include "server/metrics/metric_families.h"

namespace attend {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

constexpr int kCodeCount = 15;  // gRPC's numbers up to UNAVAILABLE, with gaps
constexpr std::array<Code, 13> kCodes = {
    Code::kOk,           Code::kCancelled,         Code::kUnknown,
    Code::kNotFound,     Code::kInvalidArgument,   Code::kDeadlineExceeded,
    Code::kInternal,     Code::kAlreadyExists,     Code::kPermissionDenied,
    Code::kUnavailable,  Code::kResourceExhausted, Code::kFailedPrecondition,
    Code::kUnimplemented};
constexpr std::array<const char*, kRejectionCount> kRejectionNames = {
    "invalid",  "unimplemented",   "memory",    "queue_full",
    "draining", "deadline_passed", "too_large", "unknown_method"};

constexpr std::array<const char*, kCheckResultCount> kCheckResultNames = {"ok", "failed", "skipped",
                                                                          "refused"};

constexpr std::array<const char*, kConnectionRefusalCount> kConnectionRefusalNames = {
    "limit", "peer_limit", "silent", "descriptors", "frames"};

enum Phase { kReceive, kUpload, kQueue, kCopyIn, kKernel, kCopyOut, kCheck, kTotal, kPhaseCount };
constexpr std::array<const char*, kPhaseCount> kPhaseNames = {
    "receive", "upload", "queue", "copy_in", "kernel", "copy_out", "check", "total"};

// An error that is not finite, or has a bound of 0, counts as this many bounds: the histogram's
// sum must stay a number.
constexpr double kErrorRatioMax = 1e6;

Histogram::BucketBoundaries DurationBuckets() {
  return {1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2,
          5e-2, 0.1,    0.25, 0.5,  1,      2.5,  5,    10,     30,   60};
}
Histogram::BucketBoundaries ErrorRatioBuckets() {
  return {0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2, 10, 100, 1000};
}

double ErrorRatio(const RowsReport& report) {
  if (report.max_abs_error == 0) return 0;
  const double ratio = report.max_abs_error / report.bound;
  return ratio <= kErrorRatioMax ? ratio : kErrorRatioMax;  // NaN too
}

// By code; null for codes that are never given.
using CodeCounters = std::array<Counter*, kCodeCount>;

CodeCounters MakeCodeCounters(Family<Counter>& family, prometheus::Labels labels) {
  CodeCounters counters{};
  for (const Code code : kCodes) {
    labels["code"] = std::string(CodeName(code));
    counters[static_cast<size_t>(code)] = &family.Add(labels);
  }
  return counters;
}

void Count(const CodeCounters& counters, Code code) {
  const size_t index = static_cast<size_t>(code);
  Counter* counter = index < kCodeCount ? counters[index] : nullptr;
  if (counter == nullptr) counter = counters[static_cast<size_t>(Code::kUnknown)];
  counter->Increment();
}

// The label sets of one tenant.
struct TenantSeries {
  CodeCounters requests{};
  Counter* flops = nullptr;
};

}  // namespace

const char* ConnectionRefusalName(ConnectionRefusal reason) {
  return kConnectionRefusalNames[static_cast<size_t>(reason)];
}

struct Metrics::Families {
  explicit Families(const std::string& version);
  void AddTenant(const std::string& name);

  std::shared_ptr<Registry> registry = std::make_shared<Registry>();
  CodeCounters requests{};
  std::array<Counter*, kRejectionCount> rejections{};
  std::array<Histogram*, kPhaseCount> phases{};
  std::array<Counter*, kTransportCount> bytes_in{};
  std::array<Counter*, kTransportCount> bytes_out{};
  Counter* bytes_in_place = nullptr;
  std::array<std::array<Counter*, kTransportCount>, kCheckResultCount> checks{};
  Counter* unread = nullptr;
  Counter* check_rows = nullptr;
  Histogram* check_error = nullptr;
  Gauge* host_used = nullptr;
  Gauge* host_largest_free = nullptr;
  Gauge* host_budget = nullptr;
  std::array<Counter*, kConnectionRefusalCount> connection_refusals{};
  Counter* accept_errors = nullptr;
  Gauge* connections = nullptr;
  Gauge* connections_limit = nullptr;
  Gauge* accepting = nullptr;
  Gauge* inflight = nullptr;
  Gauge* draining = nullptr;
  Counter* log_lines_suppressed = nullptr;
  Family<Counter>& tenant_requests;
  Family<Counter>& tenant_flops;
  Family<Counter>& split_requests;
  std::vector<Counter*> splits;  // by number of devices, from 2
  std::vector<TenantSeries> tenants;
  DeviceMetrics devices;

 private:
  void MakeRequestSeries();
  void MakeCheckSeries();
  void MakeConnectionSeries();
  void MakeProcessSeries(const std::string& version);
};

Metrics::Families::Families(const std::string& version)
    : tenant_requests(MakeCounter(*registry, "attend_tenant_requests_total",
                                  "Requests that ended, by tenant and gRPC status code")),
      tenant_flops(MakeCounter(*registry, "attend_tenant_flops_total",
                               "Floating-point operations of answered requests, by tenant")),
      split_requests(
          MakeCounter(*registry, "attend_split_requests_total",
                      "Requests that were split, by the number of devices they were cut for")),
      devices(*registry) {
  MakeRequestSeries();
  MakeCheckSeries();
  MakeConnectionSeries();
  MakeProcessSeries(version);
}

void Metrics::Families::MakeRequestSeries() {
  auto& by_code =
      MakeCounter(*registry, "attend_requests_total", "Requests that ended, by gRPC status code");
  requests = MakeCodeCounters(by_code, {});
  auto& by_reason = MakeCounter(*registry, "attend_rejected_requests_total",
                                "Requests refused before they were accepted, by reason");
  for (int i = 0; i < kRejectionCount; ++i) {
    rejections[i] = &by_reason.Add({{"reason", kRejectionNames[i]}});
  }
  unread = &MakeCounter(*registry, "attend_unread_calls_total",
                        "Calls that were ended because their clients did not read")
                .Add({});
  auto& by_phase =
      MakeHistogram(*registry, "attend_phase_duration_seconds",
                    "Time that answered requests spent in each phase; upload and total contain the "
                    "time that clients of AttendChunked took to send");
  for (int i = 0; i < kPhaseCount; ++i) {
    phases[i] = &by_phase.Add({{"phase", kPhaseNames[i]}}, DurationBuckets());
  }
  auto& bytes = MakeCounter(*registry, "attend_transport_bytes_total",
                            "Bytes of answered requests and of their answers, by transport");
  for (int i = 0; i < kTransportCount; ++i) {
    const std::string transport = TransportName(static_cast<Transport>(i));
    bytes_in[i] = &bytes.Add({{"transport", transport}, {"direction", "in"}});
    bytes_out[i] = &bytes.Add({{"transport", transport}, {"direction", "out"}});
  }
  bytes_in_place = &MakeCounter(*registry, "attend_read_in_place_bytes_total",
                                "Tensor bytes of answered requests that a device read where their "
                                "messages arrived")
                        .Add({});
}

void Metrics::Families::MakeCheckSeries() {
  auto& by_result = MakeCounter(*registry, "attend_reference_checks_total",
                                "Answers compared with the double-precision reference, by result "
                                "and by how the tensors went");
  for (int result = 0; result < kCheckResultCount; ++result) {
    for (int i = 0; i < kTransportCount; ++i) {
      checks[result][i] = &by_result.Add({{"result", kCheckResultNames[result]},
                                          {"transport", TransportName(static_cast<Transport>(i))}});
    }
  }
  check_rows = &MakeCounter(*registry, "attend_reference_check_rows_total",
                            "Output rows compared with the reference")
                    .Add({});
  check_error = &MakeHistogram(*registry, "attend_reference_check_error_ratio",
                               "Largest absolute error of a checked answer over its bound")
                     .Add({}, ErrorRatioBuckets());
}

void Metrics::Families::MakeConnectionSeries() {
  auto& by_reason = MakeCounter(*registry, "attend_connections_refused_total",
                                "Connections that the server closed, by reason");
  for (int i = 0; i < kConnectionRefusalCount; ++i) {
    connection_refusals[i] = &by_reason.Add({{"reason", kConnectionRefusalNames[i]}});
  }
  accept_errors = &MakeCounter(*registry, "attend_accept_errors_total",
                               "Times that the system let no connection be accepted")
                       .Add({});
  connections =
      &MakeGauge(*registry, "attend_connections", "Connections to gRPC's addresses").Add({});
  connections_limit =
      &MakeGauge(*registry, "attend_connections_limit", "Bound of attend_connections").Add({});
  accepting = &MakeGauge(*registry, "attend_accepting",
                         "0 while no connection can be accepted, for a second or longer")
                   .Add({});
  accepting->Set(1);
}

void Metrics::Families::MakeProcessSeries(const std::string& version) {
  MakeGauge(*registry, "attend_build_info", "Always 1; the labels say what was built")
      .Add({{"version", version}, {"compiler", "gcc " __VERSION__}, {"cuda", CudaBuildVersion()}})
      .Set(1);
  host_used =
      &MakeGauge(*registry, "attend_host_memory_used_bytes", "Host tensor memory held by requests")
           .Add({});
  host_largest_free = &MakeGauge(*registry, "attend_host_memory_largest_free_bytes",
                                 "Largest block of host tensor memory that could be taken")
                           .Add({});
  host_budget =
      &MakeGauge(*registry, "attend_host_memory_budget_bytes", "Bound of host tensor memory")
           .Add({});
  inflight =
      &MakeGauge(*registry, "attend_inflight_requests", "Requests accepted and not yet answered")
           .Add({});
  draining = &MakeGauge(*registry, "attend_draining", "1 once the server refuses new work").Add({});
  log_lines_suppressed = &MakeCounter(*registry, "attend_log_lines_suppressed_total",
                                      "Warnings and errors that --log-rate kept out of the log")
                              .Add({});
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  MakeGauge(*registry, "process_start_time_seconds", "Start of the process, seconds since 1970")
      .Add({})
      .Set(std::chrono::duration<double>(now).count());
}

void Metrics::Families::AddTenant(const std::string& name) {
  tenants.push_back({MakeCodeCounters(tenant_requests, {{"tenant", name}}),
                     &tenant_flops.Add({{"tenant", name}})});
}

Metrics::Metrics(const std::string& version) : families_(std::make_unique<Families>(version)) {}
Metrics::~Metrics() = default;

void Metrics::AddDevices(const std::vector<Device>& devices, const std::vector<Tenant>& tenants) {
  for (const Tenant& tenant : tenants) families_->AddTenant(tenant.name);
  for (const Device& device : devices) {
    families_->devices.Add(device.name, device.lanes, tenants);
  }
  for (size_t parts = 2; parts <= std::max<size_t>(2, devices.size()); ++parts) {
    families_->splits.push_back(&families_->split_requests.Add({{"parts", std::to_string(parts)}}));
  }
}

std::shared_ptr<prometheus::Registry> Metrics::registry() const { return families_->registry; }

void Metrics::RecordFinished(const Request& request, int64_t total_ns, int64_t response_bytes) {
  Families& f = *families_;
  const TenantSeries& tenant = f.tenants[request.tenant];
  Count(f.requests, request.status.code());
  Count(tenant.requests, request.status.code());
  if (request.report.has_value()) {
    RecordCheck(request.report->ok ? CheckResult::kOk : CheckResult::kFailed, request.transport);
    f.check_rows->Increment(static_cast<double>(request.report->rows_checked));
    f.check_error->Observe(ErrorRatio(*request.report));
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
  tenant.flops->Increment(request.flops);
  // What of a request is in messages counts as such, also if the rest lies in shared memory.
  const Transport messages =
      request.transport == Transport::kChunked ? Transport::kChunked : Transport::kInline;
  const size_t transport = static_cast<size_t>(messages);
  f.bytes_in[transport]->Increment(static_cast<double>(request.message_bytes));
  f.bytes_out[transport]->Increment(static_cast<double>(response_bytes));
  if (const GatheredInput* const input = request.source.gathered()) {
    f.bytes_in_place->Increment(static_cast<double>(input->bytes()));
  }
  if (const SharedTensors* const shared = request.source.shared()) {
    for (const Transport way : {Transport::kSharedMemory, Transport::kCudaIpc}) {
      const size_t n = static_cast<size_t>(way);
      f.bytes_in[n]->Increment(static_cast<double>(shared->BytesIn(way)));
      f.bytes_out[n]->Increment(static_cast<double>(shared->BytesOut(way)));
    }
  }
  f.devices.RecordAnswer(request);
}

void Metrics::RecordRejection(Rejection reason) {
  families_->rejections[static_cast<size_t>(reason)]->Increment();
}

void Metrics::RecordBatch(int device, int64_t requests, double flops, BatchClosed closed) {
  families_->devices.RecordBatch(device, requests, flops, closed);
}

void Metrics::RecordOutcome(int device, const BatchOutcome& outcome) {
  families_->devices.RecordOutcome(device, outcome);
}

void Metrics::RecordSplit(int devices) { families_->splits[devices - 2]->Increment(); }

void Metrics::RecordCheck(CheckResult result, Transport transport) {
  families_->checks[static_cast<size_t>(result)][static_cast<size_t>(transport)]->Increment();
}

void Metrics::RecordUnread() { families_->unread->Increment(); }

void Metrics::SetQueue(int device, int64_t requests) {
  families_->devices.SetQueue(device, requests);
}

void Metrics::SetTenantQueue(int device, int tenant, int64_t requests) {
  families_->devices.SetTenantQueue(device, tenant, requests);
}

void Metrics::SetLanesBusy(int device, int64_t lanes) {
  families_->devices.SetLanesBusy(device, lanes);
}

void Metrics::SetOutstanding(int device, double batches) {
  families_->devices.SetOutstanding(device, batches);
}

void Metrics::SetDeviceHealthy(int device, bool healthy) {
  families_->devices.SetHealthy(device, healthy);
}

void Metrics::SetDeviceMemory(int device, const DeviceMemoryUse& memory) {
  families_->devices.SetMemory(device, memory);
}

void Metrics::SetHostMemory(int64_t used_bytes, int64_t largest_free_bytes, int64_t budget_bytes) {
  families_->host_used->Set(static_cast<double>(used_bytes));
  families_->host_largest_free->Set(static_cast<double>(largest_free_bytes));
  families_->host_budget->Set(static_cast<double>(budget_bytes));
}

void Metrics::RecordConnectionRefused(ConnectionRefusal reason) {
  families_->connection_refusals[static_cast<size_t>(reason)]->Increment();
}

void Metrics::RecordAcceptError() { families_->accept_errors->Increment(); }

void Metrics::SetConnections(int64_t connections, int64_t limit) {
  families_->connections->Set(static_cast<double>(connections));
  families_->connections_limit->Set(static_cast<double>(limit));
}

void Metrics::SetAccepting(bool accepting) { families_->accepting->Set(accepting ? 1 : 0); }

void Metrics::SetInflight(int64_t requests) {
  families_->inflight->Set(static_cast<double>(requests));
}

void Metrics::SetDraining(bool draining) { families_->draining->Set(draining ? 1 : 0); }

void Metrics::RecordLogLinesSuppressed(int64_t lines) {
  families_->log_lines_suppressed->Increment(static_cast<double>(lines));
}

}  // namespace attend
