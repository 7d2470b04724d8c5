// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/read_rate.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/read_rate.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

HWY_BEFORE_NAMESPACE();
namespace attend::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The sum of all words, in eight chains, so that additions wait only for memory.
uint32_t SumWords(const uint32_t* words, int64_t count) {
  const hn::ScalableTag<uint32_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kChains = 8;
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  for (int64_t n = 0; n + kChains * lanes <= count; n += kChains * lanes) {
    const uint32_t* at = words + n;
    s0 = hn::Add(s0, hn::LoadU(d, at));
    s1 = hn::Add(s1, hn::LoadU(d, at + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, at + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, at + 3 * lanes));
    s4 = hn::Add(s4, hn::LoadU(d, at + 4 * lanes));
    s5 = hn::Add(s5, hn::LoadU(d, at + 5 * lanes));
    s6 = hn::Add(s6, hn::LoadU(d, at + 6 * lanes));
    s7 = hn::Add(s7, hn::LoadU(d, at + 7 * lanes));
  }
  const auto sum =
      hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attend::bench {

HWY_EXPORT(SumWords);

double MeasureReadRate(std::span<const std::byte> buffer, int threads) {
  using Clock = std::chrono::steady_clock;
  const auto* const words = reinterpret_cast<const uint32_t*>(buffer.data());
  const auto count = static_cast<int64_t>(buffer.size() / sizeof(uint32_t));
  // Threads take parts of a MiB when they are free, as in the kernel, so that a delayed thread does
  // not delay the others.
  constexpr int64_t kPart = (1 << 20) / sizeof(uint32_t);
  std::atomic<int64_t> next{0};
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::atomic<uint32_t> keep{0};  // prevents the compiler from removing the work
  const auto work = [&] {
    ready.fetch_add(1);
    while (!go.load()) std::this_thread::yield();
    uint32_t sum = 0;
    for (int64_t at = next.fetch_add(kPart); at < count; at = next.fetch_add(kPart)) {
      sum += HWY_DYNAMIC_DISPATCH(SumWords)(words + at, std::min(kPart, count - at));
    }
    keep.fetch_add(sum);
  };
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) pool.emplace_back(work);
  while (ready.load() < threads) std::this_thread::yield();
  const Clock::time_point begin = Clock::now();
  go.store(true);
  for (std::thread& thread : pool) thread.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(count) * sizeof(uint32_t) / seconds;
}

}  // namespace attend::bench
#endif  // HWY_ONCE
