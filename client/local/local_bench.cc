// SPDX-License-Identifier: Apache-2.0

#include "client/local/local_bench.h"

#include "client/load/load_runner.h"

namespace attend::client {
namespace {

void AddPhase(const Histogram& phase, Phase name, WayResult* way) {
  way->phase_mean_ms[name] = phase.mean() * 1e-6;
}

std::string ServedName(const LoadOptions& options, const AttentionCall& call) {
  const std::string transport = TransportName(options);
  if (transport == "shm") return "served, shared memory";
  if (transport != "auto") return "served, " + transport;
  const bool chunked = PayloadBytes(call) + AnswerBytes(call) >= options.client.chunked_bytes_min;
  return chunked ? "served, chunked" : "served, inline";
}

}  // namespace

Result<WayResult> BenchHere(const LoadOptions& options, int32_t device,
                            const std::atomic<bool>& interrupted, const LocalCall::NowNs& now) {
  std::vector<AttentionCall> calls;
  std::vector<std::unique_ptr<LocalCall>> locals;
  calls.reserve(static_cast<size_t>(options.pool));
  uint64_t seed = options.seed;
  for (int64_t i = 0; i < options.pool; ++i) {
    Result<AttentionCall> call = MakeRandomCall(options.mix.front(), SplitMix64(&seed));
    if (!call.ok()) return call.status();
    calls.push_back(std::move(*call));
    Result<std::unique_ptr<LocalCall>> local = LocalCall::Make(device, calls.back());
    if (!local.ok()) return local.status();
    locals.push_back(std::move(*local));
  }
  WayResult way;
  way.way = device == ATTEND_CPU ? "here, cpu" : "here, cuda:" + std::to_string(device);
  way.kernel = locals.front()->kernel();
  std::array<Histogram, kPhases> phases;
  const int64_t begin = now() + static_cast<int64_t>(options.warmup_s * 1e9);
  const int64_t end = begin + static_cast<int64_t>(options.duration_s * 1e9);
  int64_t at = now();
  const auto more = [&] {
    return options.count > 0 ? way.latency.count() < options.count : at < end;
  };
  for (size_t n = 0; more() && !interrupted; ++n, at = now()) {
    const Result<PhaseTimings> timings = locals[n % locals.size()]->Run(now);
    if (!timings.ok()) return timings.status();
    if (at < begin) continue;
    way.latency.Record(timings->total_ns);
    phases[kCopyIn].Record(timings->copy_in_ns);
    phases[kKernel].Record(timings->kernel_ns);
    phases[kCopyOut].Record(timings->copy_out_ns);
    phases[kTotal].Record(timings->total_ns);
  }
  way.elapsed_s = static_cast<double>(std::max<int64_t>(0, at - begin)) * 1e-9;
  for (const Phase phase : {kCopyIn, kKernel, kCopyOut, kTotal}) {
    AddPhase(phases[phase], phase, &way);
  }
  VerifyQueue verify(options.verify_bytes_max);
  const auto used = std::min<size_t>(locals.size(), static_cast<size_t>(way.latency.count()));
  for (size_t i = 0; i < used && !interrupted; ++i) {
    verify.Add(calls[i], locals[i]->result(), SplitMix64(&seed));
  }
  way.verified = verify.Drain();
  way.failed = way.verified.failed > 0;
  return way;
}

Result<WayResult> BenchServed(const LoadOptions& options, const std::atomic<bool>& interrupted) {
  const Result<Workload> workload = Workload::Make(options);
  if (!workload.ok()) return workload.status();
  VerifyQueue verify(options.verify_bytes_max);
  LoadRunner runner(options, *workload, &verify, &interrupted);
  const Result<LoadResult> result = runner.Run({1, 0});
  if (!result.ok()) return result.status();
  const LoadStats& stats = result->stats;
  for (const auto& [code, message] : stats.first_message) return Status(code, message);
  WayResult way;
  way.way = ServedName(options, workload->DrawRequest(0).item->call);
  way.kernel = stats.first_kernel;
  way.latency = stats.from_sent;
  way.elapsed_s = result->elapsed_s;
  for (int phase = 0; phase < kPhases; ++phase) {
    AddPhase(stats.phases[phase], static_cast<Phase>(phase), &way);
  }
  way.verified = result->verified;
  way.failed = result->failed();
  return way;
}

}  // namespace attend::client
