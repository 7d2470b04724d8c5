// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/fma_peak.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/fma_peak.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <thread>
#include <vector>

#include "kernels/cpu/tile_unit.h"

HWY_BEFORE_NAMESPACE();
namespace attend::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Runs `rounds` x 12 multiply-adds; returns the floating-point operations done. Twelve chains hide
// the latency of every core since Haswell and fit any register file.
double MultiplyAdds(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V scale = hn::Set(d, 0.999f);
  const V step = hn::Set(d, 0.001f);
  // Different values, as the compiler would merge equal chains.
  V c0 = hn::Set(d, 0.00f), c1 = hn::Set(d, 0.01f), c2 = hn::Set(d, 0.02f);
  V c3 = hn::Set(d, 0.03f), c4 = hn::Set(d, 0.04f), c5 = hn::Set(d, 0.05f);
  V c6 = hn::Set(d, 0.06f), c7 = hn::Set(d, 0.07f), c8 = hn::Set(d, 0.08f);
  V c9 = hn::Set(d, 0.09f), c10 = hn::Set(d, 0.10f), c11 = hn::Set(d, 0.11f);
  for (int64_t n = 0; n < rounds; ++n) {
    c0 = hn::MulAdd(c0, scale, step);
    c1 = hn::MulAdd(c1, scale, step);
    c2 = hn::MulAdd(c2, scale, step);
    c3 = hn::MulAdd(c3, scale, step);
    c4 = hn::MulAdd(c4, scale, step);
    c5 = hn::MulAdd(c5, scale, step);
    c6 = hn::MulAdd(c6, scale, step);
    c7 = hn::MulAdd(c7, scale, step);
    c8 = hn::MulAdd(c8, scale, step);
    c9 = hn::MulAdd(c9, scale, step);
    c10 = hn::MulAdd(c10, scale, step);
    c11 = hn::MulAdd(c11, scale, step);
  }
  const V sum = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)),
                        hn::Add(hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)),
                                hn::Add(hn::Add(c8, c9), hn::Add(c10, c11))));
  *sink = hn::GetLane(sum);
  return static_cast<double>(rounds) * 12 * 2 * static_cast<double>(hn::Lanes(d));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attend::bench {

HWY_EXPORT(MultiplyAdds);

namespace {

double TileProducts(int64_t rounds, float* sink) {
  constexpr int64_t kSteps = 16;
  alignas(64) uint16_t operands[kSteps * 32 * 32];
  std::fill(std::begin(operands), std::end(operands), uint16_t{0x3c23});
  alignas(64) float c[32 * 32];
  const cpu_flash::TileUnit& unit = cpu_flash::MachineTileUnit();
  unit.begin();
  // Rows of A overlap, so that all operands are in the L1 cache.
  for (int64_t n = 0; n < rounds; ++n) unit.multiply(operands, 64, operands, kSteps, 2, c);
  unit.end();
  *sink = c[0];
  return static_cast<double>(rounds) * 2 * 32 * 32 * 32 * kSteps;
}

// The best rate of a few runs of `operations(rounds, sink)` on all threads at once.
template <class Operations>
double MeasurePeak(int threads, int64_t rounds, const Operations& operations_of) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRuns = 3;
  constexpr auto kDuration = std::chrono::milliseconds(20);
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    std::atomic<int> ready{0};
    std::vector<double> rates(static_cast<size_t>(threads));
    const auto work = [&](int t) {
      float sink = 0;
      ready.fetch_add(1);
      while (ready.load() < threads) std::this_thread::yield();
      double operations = 0;
      const Clock::time_point begin = Clock::now();
      Clock::time_point end = begin;
      while (end - begin < kDuration) {
        operations += operations_of(rounds, &sink);
        end = Clock::now();
      }
      // Prevents the compiler from removing the work.
      static std::atomic<float> keep;
      keep.store(sink, std::memory_order_relaxed);
      rates[static_cast<size_t>(t)] =
          operations / std::chrono::duration<double>(end - begin).count();
    };
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) pool.emplace_back(work, t);
    for (std::thread& thread : pool) thread.join();
    double total = 0;
    for (const double rate : rates) total += rate;
    best = std::max(best, total);
  }
  return best;
}

}  // namespace

double MeasureFmaPeak(int threads) {
  return MeasurePeak(threads, 1 << 20, [](int64_t rounds, float* sink) {
    return HWY_DYNAMIC_DISPATCH(MultiplyAdds)(rounds, sink);
  });
}

double MeasureTilePeak(int threads) { return MeasurePeak(threads, 1 << 10, TileProducts); }

}  // namespace attend::bench
#endif  // HWY_ONCE
