// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_stats.h"

#include <cstdio>

namespace attend::client {

void LoadStats::Merge(const LoadStats& other) {
  sent += other.sent;
  for (const auto& [code, count] : other.by_code) by_code[code] += count;
  first_message.insert(other.first_message.begin(), other.first_message.end());
  unexpected += other.unexpected;
  from_intended.Merge(other.from_intended);
  from_sent.Merge(other.from_sent);
  for (int phase = 0; phase < kPhases; ++phase) phases[phase].Merge(other.phases[phase]);
  batch_requests += other.batch_requests;
  held_back += other.held_back;
  checks_passed += other.checks_passed;
  checks_failed += other.checks_failed;
  if (first_check_failure.empty()) first_check_failure = other.first_check_failure;
  window_ok += other.window_ok;
  window_bytes_in += other.window_bytes_in;
  window_bytes_out += other.window_bytes_out;
  window_flops += other.window_flops;
}

void LoadStats::AddPhases(const PhaseTimings& t) {
  phases[kReceive].Record(t.receive_ns);
  phases[kQueue].Record(t.queue_ns);
  phases[kCopyIn].Record(t.copy_in_ns);
  phases[kKernel].Record(t.kernel_ns);
  phases[kCopyOut].Record(t.copy_out_ns);
  phases[kCheck].Record(t.check_ns);
  phases[kTotal].Record(t.total_ns);
}

LoadStats Merged(const LoadRecorders& recorders) {
  LoadStats all;
  for (const auto& recorder : recorders) {
    const MutexLock lock(recorder->mutex);
    all.Merge(recorder->stats);
  }
  return all;
}

LoadInterval TakeInterval(const LoadRecorders& recorders) {
  LoadInterval all;
  for (const auto& recorder : recorders) {
    const MutexLock lock(recorder->mutex);
    all.from_sent.Merge(recorder->interval);
    recorder->interval.Clear();
    all.unexpected += recorder->stats.unexpected;
    all.window_bytes += recorder->stats.window_bytes_in + recorder->stats.window_bytes_out;
  }
  return all;
}

std::string RateText(double per_s) {
  char text[64];
  std::snprintf(text, sizeof text, per_s >= 1000 ? "%.0f" : "%.4g", per_s);
  return text;
}

}  // namespace attend::client
