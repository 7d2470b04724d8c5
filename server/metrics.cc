// SPDX-License-Identifier: Apache-2.0

#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

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
    "invalid", "unimplemented", "memory", "queue_full", "draining", "deadline_passed", "too_large"};
constexpr std::array<const char*, kBatchClosedCount> kBatchClosedNames = {
    "empty", "delay", "requests", "flops", "bytes", "large"};
constexpr std::array<DType, 3> kDTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

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
Histogram::BucketBoundaries BatchBuckets() { return {1, 2, 4, 8, 16, 32, 64, 128, 256}; }
Histogram::BucketBoundaries FlopsBuckets() {
  return {1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
}
Histogram::BucketBoundaries ErrorRatioBuckets() {
  return {0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2, 10, 100, 1000};
}

double Seconds(int64_t nanoseconds) {
  return static_cast<double>(std::max<int64_t>(0, nanoseconds)) * 1e-9;
}

double ErrorRatio(const RowsReport& report) {
  if (report.max_abs_error == 0) return 0;
  const double ratio = report.max_abs_error / report.bound;
  return ratio <= kErrorRatioMax ? ratio : kErrorRatioMax;  // NaN too
}

Family<Gauge>& MakeGauge(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
Family<Counter>& MakeCounter(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
Family<Histogram>& MakeHistogram(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
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

// The label sets of one device.
struct DeviceSeries {
  Histogram* batch_requests = nullptr;
  Histogram* batch_flops = nullptr;
  Gauge* queue = nullptr;
  Gauge* lanes_busy = nullptr;
  Gauge* outstanding = nullptr;
  Gauge* healthy = nullptr;
  std::array<Counter*, kBatchClosedCount> batches{};
  std::vector<Gauge*> tenant_queue;
  // By kernel and dtype; null for kernels of other kinds of device.
  std::array<std::array<Counter*, kDTypes.size()>, kKernelCount> kernel_requests{};
  std::array<std::array<Counter*, kDTypes.size()>, kKernelCount> flops{};
};

}  // namespace

struct Metrics::Families {
  explicit Families(const std::string& version);
  void AddDevice(const Device& device, const std::vector<Tenant>& tenants);
  void AddTenant(const std::string& name);

  std::shared_ptr<Registry> registry = std::make_shared<Registry>();
  CodeCounters requests{};
  std::array<Counter*, kRejectionCount> rejections{};
  std::array<Histogram*, kPhaseCount> phases{};
  std::array<Counter*, kTransportCount> bytes_in{};
  std::array<Counter*, kTransportCount> bytes_out{};
  Counter* checks_ok = nullptr;
  Counter* checks_failed = nullptr;
  Counter* checks_skipped = nullptr;
  Counter* check_rows = nullptr;
  Histogram* check_error = nullptr;
  Gauge* host_used = nullptr;
  Gauge* host_largest_free = nullptr;
  Gauge* host_budget = nullptr;
  Gauge* inflight = nullptr;
  Gauge* draining = nullptr;
  Family<Histogram>& batch_requests;
  Family<Histogram>& batch_flops;
  Family<Counter>& kernel_requests;
  Family<Counter>& flops;
  Family<Counter>& batches;
  Family<Counter>& tenant_requests;
  Family<Counter>& tenant_flops;
  Family<Gauge>& tenant_queue;
  Family<Gauge>& queue;
  Family<Gauge>& lanes;
  Family<Gauge>& lanes_busy;
  Family<Gauge>& outstanding;
  Family<Gauge>& healthy;
  Family<Counter>& split_requests;
  std::vector<Counter*> splits;  // by number of devices, from 2
  std::vector<DeviceSeries> devices;
  std::vector<TenantSeries> tenants;

 private:
  void MakeRequestSeries();
  void MakeCheckSeries();
  void MakeProcessSeries(const std::string& version);
};

Metrics::Families::Families(const std::string& version)
    : batch_requests(MakeHistogram(*registry, "attend_batch_requests", "Requests per batch")),
      batch_flops(
          MakeHistogram(*registry, "attend_batch_flops", "Floating-point operations per batch")),
      kernel_requests(MakeCounter(*registry, "attend_kernel_requests_total",
                                  "Requests answered, by the kernel that ran")),
      flops(MakeCounter(*registry, "attend_flops_total",
                        "Floating-point operations of answered requests")),
      batches(MakeCounter(*registry, "attend_batches_total",
                          "Batches started, by why they took no more requests")),
      tenant_requests(MakeCounter(*registry, "attend_tenant_requests_total",
                                  "Requests that ended, by tenant and gRPC status code")),
      tenant_flops(MakeCounter(*registry, "attend_tenant_flops_total",
                               "Floating-point operations of answered requests, by tenant")),
      tenant_queue(MakeGauge(*registry, "attend_tenant_queue_requests",
                             "Requests waiting for a lane, by tenant")),
      queue(MakeGauge(*registry, "attend_queue_requests", "Requests waiting for a lane")),
      lanes(MakeGauge(*registry, "attend_lanes", "Batches that a device can run at once")),
      lanes_busy(MakeGauge(*registry, "attend_lanes_busy", "Lanes that run a batch now")),
      outstanding(MakeGauge(*registry, "attend_outstanding_cost",
                            "Cost of the requests that wait or run, in full batches")),
      healthy(MakeGauge(*registry, "attend_device_healthy", "1 while the device takes work")),
      split_requests(MakeCounter(*registry, "attend_split_requests_total",
                                 "Requests that were split, by the number of devices")) {
  MakeRequestSeries();
  MakeCheckSeries();
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
}

void Metrics::Families::MakeCheckSeries() {
  auto& checks = MakeCounter(*registry, "attend_reference_checks_total",
                             "Answers compared with the double-precision reference, by result");
  checks_ok = &checks.Add({{"result", "ok"}});
  checks_failed = &checks.Add({{"result", "failed"}});
  checks_skipped = &checks.Add({{"result", "skipped"}});
  check_rows = &MakeCounter(*registry, "attend_reference_check_rows_total",
                            "Output rows compared with the reference")
                    .Add({});
  check_error = &MakeHistogram(*registry, "attend_reference_check_error_ratio",
                               "Largest absolute error of a checked answer over its bound")
                     .Add({}, ErrorRatioBuckets());
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
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  MakeGauge(*registry, "process_start_time_seconds", "Start of the process, seconds since 1970")
      .Add({})
      .Set(std::chrono::duration<double>(now).count());
}

void Metrics::Families::AddTenant(const std::string& name) {
  tenants.push_back({MakeCodeCounters(tenant_requests, {{"tenant", name}}),
                     &tenant_flops.Add({{"tenant", name}})});
}

void Metrics::Families::AddDevice(const Device& device, const std::vector<Tenant>& tenants) {
  const prometheus::Labels labels = {{"device", device.name}};
  DeviceSeries series;
  series.batch_requests = &batch_requests.Add(labels, BatchBuckets());
  series.batch_flops = &batch_flops.Add(labels, FlopsBuckets());
  series.queue = &queue.Add(labels);
  series.lanes_busy = &lanes_busy.Add(labels);
  series.outstanding = &outstanding.Add(labels);
  series.healthy = &healthy.Add(labels);
  series.healthy->Set(1);
  lanes.Add(labels).Set(device.lanes);
  for (int i = 0; i < kBatchClosedCount; ++i) {
    series.batches[i] = &batches.Add({{"device", device.name}, {"closed", kBatchClosedNames[i]}});
  }
  for (const Tenant& tenant : tenants) {
    series.tenant_queue.push_back(
        &tenant_queue.Add({{"device", device.name}, {"tenant", tenant.name}}));
  }
  const DeviceKind kind = device.name.starts_with("cuda") ? DeviceKind::kCuda : DeviceKind::kCpu;
  for (const KernelInfo& kernel : Kernels()) {
    if (kernel.device != kind) continue;
    for (size_t i = 0; i < kDTypes.size(); ++i) {
      const prometheus::Labels labels = {{"kernel", std::string(kernel.name)},
                                         {"dtype", std::string(DTypeName(kDTypes[i]))},
                                         {"device", device.name}};
      series.kernel_requests[static_cast<size_t>(kernel.id)][i] = &kernel_requests.Add(labels);
      series.flops[static_cast<size_t>(kernel.id)][i] = &flops.Add(labels);
    }
  }
  devices.push_back(series);
}

Metrics::Metrics(std::string version) : families_(std::make_unique<Families>(version)) {}
Metrics::~Metrics() = default;

void Metrics::AddDevices(const std::vector<Device>& devices, const std::vector<Tenant>& tenants) {
  for (const Tenant& tenant : tenants) families_->AddTenant(tenant.name);
  for (const Device& device : devices) families_->AddDevice(device, tenants);
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
    (request.report->ok ? f.checks_ok : f.checks_failed)->Increment();
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
  if (request.shared != nullptr) {
    for (const Transport way : {Transport::kSharedMemory, Transport::kCudaIpc}) {
      const size_t n = static_cast<size_t>(way);
      f.bytes_in[n]->Increment(static_cast<double>(request.shared->BytesIn(way)));
      f.bytes_out[n]->Increment(static_cast<double>(request.shared->BytesOut(way)));
    }
  }
  if (request.device < 0 || request.device >= static_cast<int>(f.devices.size())) return;
  const DeviceSeries& device = f.devices[request.device];
  const size_t kernel = static_cast<size_t>(request.selection.kernel);
  const size_t dtype = static_cast<size_t>(request.attention.problem.dtype) - 1;
  if (device.flops[kernel][dtype] == nullptr) return;
  device.kernel_requests[kernel][dtype]->Increment();
  if (request.device_flops.empty()) device.flops[kernel][dtype]->Increment(request.flops);
  for (const Request::DeviceFlops& each : request.device_flops) {
    f.devices[each.device].flops[kernel][dtype]->Increment(each.flops);
  }
}

void Metrics::RecordRejection(Rejection reason) {
  families_->rejections[static_cast<size_t>(reason)]->Increment();
}

void Metrics::RecordBatch(int device, int64_t requests, double flops, BatchClosed closed) {
  families_->devices[device].batch_requests->Observe(static_cast<double>(requests));
  families_->devices[device].batch_flops->Observe(flops);
  families_->devices[device].batches[static_cast<size_t>(closed)]->Increment();
}

void Metrics::RecordSplit(int devices) { families_->splits[devices - 2]->Increment(); }

void Metrics::RecordCheckSkipped() { families_->checks_skipped->Increment(); }

void Metrics::SetQueue(int device, int64_t requests) {
  families_->devices[device].queue->Set(static_cast<double>(requests));
}

void Metrics::SetTenantQueue(int device, int tenant, int64_t requests) {
  families_->devices[device].tenant_queue[tenant]->Set(static_cast<double>(requests));
}

void Metrics::SetLanesBusy(int device, int64_t lanes) {
  families_->devices[device].lanes_busy->Set(static_cast<double>(lanes));
}

void Metrics::SetOutstanding(int device, double batches) {
  families_->devices[device].outstanding->Set(batches);
}

void Metrics::SetDeviceHealthy(int device, bool healthy) {
  families_->devices[device].healthy->Set(healthy ? 1 : 0);
}

void Metrics::SetHostMemory(int64_t used_bytes, int64_t largest_free_bytes, int64_t budget_bytes) {
  families_->host_used->Set(static_cast<double>(used_bytes));
  families_->host_largest_free->Set(static_cast<double>(largest_free_bytes));
  families_->host_budget->Set(static_cast<double>(budget_bytes));
}

void Metrics::SetInflight(int64_t requests) {
  families_->inflight->Set(static_cast<double>(requests));
}

void Metrics::SetDraining(bool draining) { families_->draining->Set(draining ? 1 : 0); }

}  // namespace attend
