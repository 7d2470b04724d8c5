// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_stats.h"

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
  retries += other.retries;
  for (const auto& [id, calls] : other.servers) {
    ServerCalls& own = servers[id];
    if (own.address.empty()) own.address = calls.address;
    own.answered += calls.answered;
    own.ok += calls.ok;
  }
  checks_passed += other.checks_passed;
  checks_failed += other.checks_failed;
  checks_undecided += other.checks_undecided;
  if (first_check_failure.empty()) first_check_failure = other.first_check_failure;
  window_ok += other.window_ok;
  window_bytes_in += other.window_bytes_in;
  window_bytes_out += other.window_bytes_out;
  window_flops += other.window_flops;
}

void LoadStats::AddPhases(const PhaseTimings& t, int64_t latency_ns) {
  phases[kReceive].Record(t.receive_ns);
  phases[kQueue].Record(t.queue_ns);
  phases[kCopyIn].Record(t.copy_in_ns);
  phases[kKernel].Record(t.kernel_ns);
  phases[kCopyOut].Record(t.copy_out_ns);
  phases[kCheck].Record(t.check_ns);
  phases[kTotal].Record(t.total_ns);
  phases[kNetwork].Record(latency_ns - t.total_ns);
}

LoadStats Merged(const LoadRecorders& recorders, int64_t first, int64_t last) {
  LoadStats all;
  for (const auto& recorder : recorders) {
    const MutexLock lock(recorder->mutex);
    const auto end = recorder->windows.upper_bound(last);
    for (auto at = recorder->windows.lower_bound(first); at != end; ++at) all.Merge(at->second);
  }
  return all;
}

LoadStats MergeEarlier(const LoadRecorders& recorders, int64_t first) {
  LoadStats all;
  for (const auto& recorder : recorders) {
    const MutexLock lock(recorder->mutex);
    const auto end = recorder->windows.lower_bound(first);
    for (auto at = recorder->windows.begin(); at != end; ++at) recorder->earlier.Merge(at->second);
    recorder->windows.erase(recorder->windows.begin(), end);
    all.Merge(recorder->earlier);
  }
  return all;
}

LoadInterval TakeInterval(const LoadRecorders& recorders) {
  LoadInterval all;
  for (const auto& recorder : recorders) {
    const MutexLock lock(recorder->mutex);
    all.from_sent.Merge(recorder->interval);
    recorder->interval.Clear();
    const auto add = [&all](const LoadStats& stats) {
      all.unexpected += stats.unexpected;
      all.window_bytes += stats.window_bytes_in + stats.window_bytes_out;
    };
    add(recorder->earlier);
    for (const auto& [index, stats] : recorder->windows) add(stats);
  }
  return all;
}

}  // namespace attend::client
