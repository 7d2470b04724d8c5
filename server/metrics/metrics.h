// SPDX-License-Identifier: Apache-2.0
//
// The Prometheus families that are counted as events happen, with their labels. Those by device are
// in device_metrics.h, those by tenant in tenant_metrics.h. Families read at a scrape are in
// server/app: uploads and shared memory in collectors.h, NVML in gpu_stats.h. The engine's families
// exist from the start, those by device or tenant from AddDevices; label sets known at the start
// begin at zero. Recording is thread-safe and takes well under a microsecond: series are looked up
// once, at construction.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/schedule/batcher.h"
#include "server/schedule/tenants.h"
#include "server/util/rejection.h"

namespace prometheus {
class Registry;
}

namespace attend {

// The outcome of a reference check.
enum class CheckResult {
  kOk = 0,
  kFailed,
  kSkipped,    // sampled by the server, but there was no time, room or memory for it
  kRefused,    // requested by a client; likewise, and the request got RESOURCE_EXHAUSTED
  kInputs,     // of gradients: the request's O and LSE do not match its tensors
  kUndecided,  // no row was found wrong, but some could not be judged
};
inline constexpr int kCheckResultCount = 6;

// Why the server closed a connection.
enum class ConnectionRefusal {
  kLimit = 0,
  kPeerLimit,
  kSilent,       // it sent no frame in time, or before its place was needed
  kDescriptors,  // the process has none left
  kFrames,       // it sent HTTP/2 frames that no proper client sends
  kTls,          // the TLS handshake failed, or its certificate is not trusted any more
  kPlaintext,    // it spoke plaintext where TLS is required
  kUser,         // its user may not connect to the Unix socket
  kStranger,     // no accepted call in time, or before its place was needed
  kStalled,      // a message stalled
  kMessages,     // it held most memory in unfinished messages when all held too much
};
inline constexpr int kConnectionRefusalCount = 11;
std::string_view ConnectionRefusalName(ConnectionRefusal reason);

class Metrics {
 public:
  struct Device {
    std::string name;
    int lanes = 0;
  };

  explicit Metrics(const std::string& version);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Makes the label sets by device, kernel and tenant. Call it once, before any recording.
  void AddDevices(const std::vector<Device>& devices,
                  const std::vector<Tenant>& tenants = Tenants().list());

  // For the metrics endpoint.
  std::shared_ptr<prometheus::Registry> registry() const;

  // Records a finished request, also a refused one: attend_requests_total{code},
  // attend_objective_requests_total{code}, attend_short_deadlines_total,
  // attend_early_cancellations_total, attend_backward_requests_total{code},
  // attend_deadline_requests_total{outcome}, attend_tenant_requests_total{tenant,code},
  // attend_tenant_limited_requests_total{tenant} (refused by a tenant limit),
  // attend_rejected_requests_total{reason} (refused before acceptance),
  // attend_reference_checks_total{result,transport} and its rows and errors. If its status is OK,
  // also attend_phase_duration_seconds{phase}, attend_tenant_flops_total{tenant},
  // attend_flops_total and attend_kernel_requests_total{kernel,dtype,device},
  // attend_transport_bytes_total{transport,direction} and attend_read_in_place_bytes_total.
  void RecordFinished(const Request& request, int64_t total_ns, int64_t response_bytes);
  // Finished requests with status OK.
  int64_t answered() const;
  // attend_tenant_small_calls_total{tenant,code}, for a call without tensors.
  void RecordSmallCall(int tenant, Code code);
  // attend_rejected_requests_total{reason}, for a call that was not a request.
  void RecordRejection(Rejection reason);
  // attend_batch_requests, attend_batch_flops, attend_batches_total{closed}
  void RecordBatch(int device, int64_t requests, double flops, BatchClosed closed);
  // attend_device_phase_seconds_total{phase}, attend_device_span_seconds_total,
  // attend_cut_parts_total; once per batch that ran.
  void RecordOutcome(int device, const BatchOutcome& outcome);
  // attend_reference_checks_total{result,transport}, for checks that did not run
  void RecordCheck(CheckResult result, Transport transport);
  void RecordUnread();  // attend_unread_calls_total

  void SetQueue(int device, int64_t requests);  // attend_queue_requests{device}
  // attend_tenant_queue_requests{device,tenant}
  void SetTenantQueue(int device, int tenant, int64_t requests);
  void SetLanesBusy(int device, int64_t lanes);     // attend_lanes_busy{device}
  void SetBacklog(int device, Duration expected);   // attend_backlog_seconds{device}
  void SetOutstanding(int device, double batches);  // attend_outstanding_cost{device}
  void SetDeviceHealthy(int device, bool healthy);
  // attend_device_memory_used_bytes{device}, attend_device_memory_limit_bytes{device}
  void SetDeviceMemory(int device, const DeviceMemoryUse& memory);
  void SetHostMemory(int64_t used_bytes, int64_t largest_free_bytes, int64_t budget_bytes);
  // attend_connections_refused_total{reason}
  void RecordConnectionRefused(ConnectionRefusal reason);
  void RecordAcceptError();  // attend_accept_errors_total
  // attend_connections, attend_connections_limit
  void SetConnections(int64_t connections, int64_t limit);
  void SetAccepting(bool accepting);       // attend_accepting
  void SetInflight(int64_t requests);      // attend_inflight_requests
  void SetUnansweredSeconds(int seconds);  // attend_heartbeat_unanswered_seconds
  void SetDraining(bool draining);
  // attend_tokens_reloads_total{result}, and attend_reload_failed of `tokens`.
  void RecordTokensReload(bool ok);
  void SetReloadFailed(const std::string& what, bool failed);  // attend_reload_failed{what}
  void SetDevicesLeftOut(int devices);                         // attend_devices_left_out
  void RecordLogLinesSuppressed(int64_t lines);                // attend_log_lines_suppressed_total

 private:
  struct Families;
  std::unique_ptr<Families> families_;
};

}  // namespace attend
