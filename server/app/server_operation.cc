// SPDX-License-Identifier: Apache-2.0
//
// Server's functions for operators: the access log, spans, load reports and AdminService.

#include <chrono>
#include <utility>

#include "server/app/observing.h"
#include "server/app/options.h"
#include "server/app/server.h"
#include "server/app/server_parts.h"
#include "server/util/assign.h"

namespace attend {
namespace {

// At the end, for unwritten lines and unsent spans.
constexpr Duration kLastLinesTime = std::chrono::milliseconds(500);

}  // namespace

Status Server::StartObserving() {
  if (config_.access_log != "off") {
    ATTEND_RETURN_IF_ERROR(
        Assign(access_log_, AccessLog::Open(MakeAccessLogOptions(config_), *logger_, clock_)));
    reloads_.Add("access-log", [this] { return access_log_->Reopen(); });
  }
  if (config_.otlp_endpoint.empty()) return Status();
  ATTEND_RETURN_IF_ERROR(Assign(tracer_, MakeTracer(config_, *logger_, clock_)));
  if (!config_.otlp_tls_ca.empty() || !config_.otlp_tls_cert.empty()) {
    reloads_.Add("otlp-tls-ca", [this] { return tracer_->exporter().Reload(); });
  }
  return Status();
}

void Server::FlushObserving() {
  if (access_log_ != nullptr) {
    access_log_->Flush(std::chrono::steady_clock::now() + kLastLinesTime);
  }
  if (tracer_ != nullptr) tracer_->exporter().Flush(clock_.Now() + kLastLinesTime);
}

void Server::StartLoadReports() {
  const auto totals = [this] {
    LoadMeter::Totals sum;
    sum.answered = static_cast<double>(metrics_.answered());
    for (const Engine::DeviceState& device : engine_->Devices()) {
      if (!device.healthy) continue;
      sum.busy += device.busy;
      sum.lanes += device.lanes;
    }
    return sum;
  };
  load_ = std::make_unique<LoadMeter>(totals, clock_);
}

void Server::MakeAdmin() {
  accepting_ = std::make_unique<Accepting>(
      [this] {
        // In this order, so that every client that has seen NOT_SERVING or a GOAWAY is refused.
        engine_->Drain();
        UpdateHealth();
        context_->streams.EndAll();
        const MutexLock lock(serving_mutex_);
        if (serving_ != nullptr) serving_->Drain();
      },
      [this] {
        context_->streams.Resume();
        engine_->Undrain();
        UpdateHealth();
      });
  AdminServiceImpl::Hooks hooks;
  hooks.drain = [this] { accepting_->Stop(); };
  hooks.undrain = [this] { return accepting_->Resume(); };
  hooks.fill_status = [this](v1::GetStatusResponse* status) {
    status->set_version(Version());
    status->set_uptime_seconds(std::chrono::duration<double>(clock_.Now() - started_).count());
    status->set_ending(accepting_->ending());
    const MutexLock lock(serving_mutex_);
    if (serving_ != nullptr) status->set_connections(serving_->CountConnections());
  };
  admin_service_ = std::make_unique<AdminServiceImpl>(*context_, sessions(),
                                                      SocketsArePrivate(config_), std::move(hooks));
}

}  // namespace attend
