// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/load_report.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

namespace attend {
namespace {

constexpr Duration kWindow = std::chrono::seconds(1);

// Field numbers of OrcaLoadReport.
constexpr int kRpsFractional = 6;
constexpr int kApplicationUtilization = 9;

void AddDouble(int field, double value, std::string& bytes) {
  if (value == 0) return;
  constexpr int kFixed64 = 1;
  bytes.push_back(static_cast<char>(field << 3 | kFixed64));
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(bits >> shift));
}

double Seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

std::string LoadReport::Encode() const {
  std::string bytes;
  AddDouble(kRpsFractional, requests_per_s, bytes);
  AddDouble(kApplicationUtilization, utilization, bytes);
  return bytes;
}

LoadMeter::LoadMeter(std::function<Totals()> totals, const Clock& clock)
    : totals_(std::move(totals)), clock_(clock), since_(clock.Now()), before_(totals_()) {}

std::string LoadMeter::Report() {
  const TimePoint now = clock_.Now();
  const MutexLock lock(mutex_);
  if (now - since_ >= kWindow) {
    const Totals totals = totals_();
    const double seconds = Seconds(now - since_);
    LoadReport report;
    report.requests_per_s = (totals.answered - before_.answered) / seconds;
    if (totals.lanes > 0) {
      // Can decrease if a device was lost.
      const Duration busy = std::max(Duration::zero(), totals.busy - before_.busy);
      report.utilization = Seconds(busy) / (seconds * static_cast<double>(totals.lanes));
    }
    report_ = report.Encode();
    before_ = totals;
    since_ = now;
  }
  return report_;
}

void LoadMeter::Tell(const WireCall& call) {
  const std::string report = Report();
  if (!report.empty()) call.AddTrailingMetadata("endpoint-load-metrics-bin", report);
}

}  // namespace attend
