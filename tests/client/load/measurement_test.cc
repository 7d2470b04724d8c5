// SPDX-License-Identifier: Apache-2.0
//
// The windows of a measurement with synthetic requests and a manual clock.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/load/measurement.h"

namespace attend::client {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kBegin = 50 * kSecond;

class Load {
 public:
  explicit Load(const LoadOptions& options) : measurement(options, 2, kBegin) {}

  // `count` requests due in the window that begins at `second`, each answered after latency_ns.
  void Add(int64_t second, int64_t count, int64_t latency_ns, bool unexpected = false) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t sent = kBegin + second * kSecond + i * kSecond / count;
      measurement.CountDue(sent);
      LoadRecorder& recorder = *measurement.recorders()[static_cast<size_t>(i % 2)];
      const MutexLock lock(recorder.mutex);
      LoadStats& stats = recorder.windows[measurement.window_of(sent)];
      ++stats.sent;
      stats.from_intended.Record(latency_ns);
      stats.unexpected += unexpected;
      const int64_t arrival = sent + latency_ns;
      if (arrival < measurement.end_ns()) {
        ++recorder.windows[measurement.window_of(arrival)].window_ok;
      }
    }
  }

  Measurement measurement;
};

LoadOptions Options(double duration_s) {
  LoadOptions options;
  options.duration_s = duration_s;
  return options;
}

TEST(Measurement, WithoutAStabilityRuleEveryWindowIsReported) {
  const LoadOptions options = Options(5);
  Load load(options);
  EXPECT_EQ(load.measurement.end_ns(), kBegin + 5 * kSecond);
  for (int64_t second = 0; second < 5; ++second) {
    load.Add(second, 100 + 10 * second, 1000);
    EXPECT_EQ(load.measurement.next_ns(), kBegin + (second + 1) * kSecond);
    load.measurement.Judge(kBegin + (second + 1) * kSecond);
  }
  LoadResult result;
  load.measurement.Fill(kBegin + 5 * kSecond, &result);
  ASSERT_EQ(result.windows.size(), 5u);
  EXPECT_EQ(result.windows[3].start_s, 3);
  EXPECT_EQ(result.windows[3].ok, 130);
  EXPECT_EQ(result.windows[3].latency.count(), 130);
  EXPECT_EQ(result.first_reported, 0);
  EXPECT_EQ(result.elapsed_s, 5);
  EXPECT_EQ(result.stats.window_ok, 600);
  EXPECT_EQ(result.due, 600);
  EXPECT_FALSE(result.stable);
}

TEST(Measurement, AStableMeasurementReportsItsLastThreeWindows) {
  LoadOptions options = Options(1);
  options.stability = StabilityRule{};
  Load load(options);
  EXPECT_EQ(load.measurement.end_ns(), kBegin + 10 * kSecond);
  const int64_t rates[] = {10, 50, 100, 101, 102};
  for (int64_t second = 0; second < 5; ++second) {
    EXPECT_GT(load.measurement.end_ns(), kBegin + second * kSecond) << "not yet stable";
    load.Add(second, rates[second], 1000, /*unexpected=*/second == 0);
    load.measurement.Judge(kBegin + (second + 1) * kSecond);
  }
  EXPECT_EQ(load.measurement.end_ns(), kBegin + 5 * kSecond);
  EXPECT_EQ(load.measurement.reported_from_ns(), kBegin + 2 * kSecond);
  load.Add(5, 7, 1000);  // sent before the end was known
  LoadResult result;
  load.measurement.Fill(kBegin + 5 * kSecond, &result);
  EXPECT_TRUE(result.stable);
  EXPECT_TRUE(result.spread.Within(10));
  EXPECT_EQ(result.windows.size(), 5u);
  EXPECT_EQ(result.first_reported, 2);
  EXPECT_EQ(result.elapsed_s, 3);
  EXPECT_EQ(result.stats.window_ok, 303);
  EXPECT_EQ(result.stats.from_intended.count(), 303);
  EXPECT_EQ(result.due, 303);
  EXPECT_EQ(result.stats.unexpected, 0);
  EXPECT_EQ(result.earlier.unexpected, 10);
  EXPECT_TRUE(result.failed()) << "a failure counts in whichever window it is";
}

TEST(Measurement, AnUnstableMeasurementReportsItsLastThreeWindows) {
  LoadOptions options = Options(1);
  options.stability = StabilityRule{5, 95, 4};
  Load load(options);
  for (int64_t second = 0; second < 4; ++second) {
    load.Add(second, second % 2 ? 100 : 200, 1000);
    load.measurement.Judge(kBegin + (second + 1) * kSecond);
  }
  LoadResult result;
  load.measurement.Fill(kBegin + 4 * kSecond, &result);
  EXPECT_FALSE(result.stable);
  EXPECT_FALSE(result.spread.Within(5));
  EXPECT_EQ(result.stats.window_ok, 400);
  EXPECT_EQ(result.elapsed_s, 3);
}

TEST(Measurement, AnswersAfterTheEndCountOnlyAsLatencies) {
  const LoadOptions options = Options(5);
  Load load(options);
  load.Add(4, 10, 3 * kSecond);
  load.measurement.Judge(kBegin + 8 * kSecond);
  LoadResult result;
  load.measurement.Fill(kBegin + 8 * kSecond, &result);
  EXPECT_EQ(result.stats.window_ok, 0);
  EXPECT_EQ(result.stats.from_intended.count(), 10);
  EXPECT_EQ(result.windows.at(4).latency.count(), 10);
}

TEST(Measurement, AnInterruptEndsItWithinAWindow) {
  const LoadOptions options = Options(5);
  Load load(options);
  load.Add(0, 10, 1000);
  load.measurement.Judge(kBegin + kSecond);
  load.Add(1, 10, 1000);
  load.measurement.Interrupt(kBegin + 3 * kSecond / 2);
  LoadResult result;
  load.measurement.Fill(kBegin + 3 * kSecond / 2, &result);
  EXPECT_EQ(result.elapsed_s, 1.5);
  ASSERT_EQ(result.windows.size(), 2u);
  EXPECT_EQ(result.windows[1].elapsed_s, 0.5);
  EXPECT_EQ(result.stats.window_ok, 20);
}

TEST(Measurement, AFixedNumberOfRequestsIsOneWindow) {
  LoadOptions options;
  options.count = 30;
  Load load(options);
  EXPECT_EQ(load.measurement.end_ns(), INT64_MAX);
  load.Add(0, 10, 1000);
  load.Add(7, 20, 1000);
  load.measurement.Judge(kBegin + 9 * kSecond);
  LoadResult result;
  load.measurement.Fill(kBegin + 8 * kSecond, &result);
  ASSERT_EQ(result.windows.size(), 1u);
  EXPECT_EQ(result.windows[0].elapsed_s, 8);
  EXPECT_EQ(result.elapsed_s, 8);
  EXPECT_EQ(result.stats.window_ok, 30);
  EXPECT_EQ(result.due, 30);
}

}  // namespace
}  // namespace attend::client
