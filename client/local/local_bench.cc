// SPDX-License-Identifier: Apache-2.0

#include "client/local/local_bench.h"

#include <algorithm>
#include <cmath>

namespace attend::client {
namespace {

// Accumulated times of one way's calls.
struct Tally {
  WayResult result;
  std::array<Histogram, kPhases> phases;
  Histogram client;
  size_t runs = 0;  // warm-up included

  void Add(const CallTime& time) {
    result.latency.Record(time.total_ns);
    client.Record(time.client_ns);
    phases[kReceive].Record(time.phases.receive_ns);
    phases[kQueue].Record(time.phases.queue_ns);
    phases[kCopyIn].Record(time.phases.copy_in_ns);
    phases[kKernel].Record(time.phases.kernel_ns);
    phases[kCopyOut].Record(time.phases.copy_out_ns);
    phases[kCheck].Record(time.phases.check_ns);
    phases[kTotal].Record(time.phases.total_ns);
    phases[kNetwork].Record(time.total_ns - time.client_ns - time.phases.total_ns);
  }

  WayResult Finished() && {
    for (int phase = 0; phase < kPhases; ++phase) {
      result.phase_mean_ms[phase] = phases[phase].mean() * 1e-6;
    }
    result.client_mean_ms = client.mean() * 1e-6;
    return std::move(result);
  }
};

struct Turn {
  int64_t warmup_ns;
  int64_t duration_ns;
  int64_t count;  // calls; 0: limited by time
};

Status Take(const Turn& turn, size_t inputs, const std::atomic<bool>& interrupted,
            const LocalCall::NowNs& now, Way& way, Tally* tally) {
  const int64_t begin = now() + turn.warmup_ns;
  int64_t measured = 0, sum_ns = 0, from = 0, at = now();
  const auto over = [&] {
    return turn.count > 0 ? measured == turn.count : measured > 0 && at >= begin + turn.duration_ns;
  };
  for (; !interrupted && !over(); at = now()) {
    const Result<CallTime> time = way.Run(tally->runs++ % inputs, now);
    if (!time.ok()) return time.status();
    if (at < begin) continue;
    if (measured++ == 0) from = at;
    sum_ns += time->total_ns;
    tally->Add(*time);
  }
  if (measured == 0) return Status();
  tally->result.elapsed_s += static_cast<double>(at - from) * 1e-9;
  tally->result.round_mean_ms.push_back(static_cast<double>(sum_ns) * 1e-6 /
                                        static_cast<double>(measured));
  return Status();
}

// A round's share of `count` calls; the remainder goes to the first rounds.
int64_t CountOf(int64_t count, int64_t rounds, int64_t round) {
  return count / rounds + (round < count % rounds ? 1 : 0);
}

void Verify(const std::vector<AttentionCall>& calls, const Way& way, uint64_t seed,
            int64_t bytes_max, Tally* tally) {
  VerifyQueue verify(bytes_max);
  for (size_t n = 0; n < std::min(calls.size(), tally->runs); ++n) {
    verify.Add(calls[n], way.result(n), SplitMix64(&seed));
  }
  tally->result.verified = verify.Drain();
  tally->result.failed = tally->result.verified.failed > 0;
}

}  // namespace

Result<std::vector<WayResult>> BenchWays(const LoadOptions& options, int64_t rounds,
                                         const std::vector<AttentionCall>& calls,
                                         const std::vector<std::unique_ptr<Way>>& ways,
                                         const std::atomic<bool>& interrupted,
                                         const LocalCall::NowNs& now) {
  std::vector<Tally> tallies(ways.size());
  for (int64_t round = 0; round < rounds; ++round) {
    const Turn turn = {std::llround(options.warmup_s * 1e9),
                       std::llround(options.duration_s * 1e9 / static_cast<double>(rounds)),
                       CountOf(options.count, rounds, round)};
    if (options.count > 0 && turn.count == 0) break;
    for (size_t i = 0; i < ways.size(); ++i) {
      const size_t n = (static_cast<size_t>(round) + i) % ways.size();
      ATTEND_RETURN_IF_ERROR(Take(turn, calls.size(), interrupted, now, *ways[n], &tallies[n]));
    }
  }
  std::vector<WayResult> results;
  for (size_t n = 0; n < ways.size(); ++n) {
    tallies[n].result.way = ways[n]->name();
    if (tallies[n].runs > 0) tallies[n].result.kernel = ways[n]->result(0).kernel;
    if (!interrupted) Verify(calls, *ways[n], options.seed, options.verify_bytes_max, &tallies[n]);
    results.push_back(std::move(tallies[n]).Finished());
  }
  return results;
}

TimesAsLong BesideHere(const WayResult& way, const WayResult& here) {
  std::vector<double> ratios;
  const size_t rounds = std::min(way.round_mean_ms.size(), here.round_mean_ms.size());
  for (size_t i = 0; i < rounds; ++i) {
    if (here.round_mean_ms[i] > 0) ratios.push_back(way.round_mean_ms[i] / here.round_mean_ms[i]);
  }
  if (ratios.empty()) return {};
  std::sort(ratios.begin(), ratios.end());
  const size_t half = ratios.size() / 2;
  const double median =
      ratios.size() % 2 == 1 ? ratios[half] : (ratios[half - 1] + ratios[half]) / 2;
  return {median, ratios.front(), ratios.back()};
}

}  // namespace attend::client
