// SPDX-License-Identifier: Apache-2.0

#include "server/net/heap_pressure.h"

#include <gtest/gtest.h>

#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using std::chrono::seconds;

// A flood fills the heap faster than malloc can be asked how full it is.
TEST(HeapPressureTest, CallsCountUntilItLooksAgain) {
  TimePoint now = TimePoint() + seconds(1000);
  const test::ManualClock clock;
  HeapPressure heap(100, 10, clock, [] { return int64_t{0}; });
  for (int n = 0; n < 10; ++n) EXPECT_EQ(heap.CallsAllowed(now, 50), HeapPressure::kUnbounded);
  EXPECT_EQ(heap.CallsAllowed(now, 50), 45);
  now += seconds(1);
  EXPECT_EQ(heap.CallsAllowed(now, 50), HeapPressure::kUnbounded);
}

TEST(HeapPressureTest, LooksForATenthOfTheTimeAtMost) {
  test::ManualClock clock;
  int looks = 0;
  HeapPressure heap(100, 10, clock, [&] {
    ++looks;
    clock.Advance(seconds(1));
    return int64_t{0};
  });
  const TimePoint begin = clock.Now();
  looks = 0;
  for (int second = 0; second < 30; ++second) heap.CallsAllowed(begin + seconds(second), 50);
  EXPECT_EQ(looks, 3);
}

}  // namespace
}  // namespace attend
