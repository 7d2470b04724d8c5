// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/util/byte_ranges.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

TEST(ByteRangesTest, AcceptsEachByteOnceInAnyOrder) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    constexpr int64_t kSize = 200;
    std::vector<bool> taken(kSize);
    ByteRanges ranges;
    for (int i = 0; i < 300; ++i) {
      const int64_t begin = static_cast<int64_t>(random() % kSize);
      const int64_t end = std::min<int64_t>(kSize, begin + 1 + static_cast<int64_t>(random() % 9));
      const bool free =
          std::none_of(taken.begin() + begin, taken.begin() + end, [](bool each) { return each; });
      const std::optional<ByteRange> overlap = ranges.Add({begin, end});
      ASSERT_EQ(!overlap.has_value(), free) << begin << " to " << end;
      if (free) {
        std::fill(taken.begin() + begin, taken.begin() + end, true);
      } else {
        EXPECT_TRUE(overlap->begin < end && overlap->end > begin);
      }
      ASSERT_EQ(ranges.bytes(), std::count(taken.begin(), taken.end(), true));
      int64_t count = 0;
      for (int64_t at = 0; at < kSize; ++at) count += taken[at] && (at == 0 || !taken[at - 1]);
      ASSERT_EQ(ranges.count(), count);
    }
  }
}

}  // namespace
}  // namespace attend
