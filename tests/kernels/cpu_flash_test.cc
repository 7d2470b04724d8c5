// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include "kernels/check_rows.h"
#include "kernels/cpu/cpu_flash.h"
#include "tests/kernels/problems.h"
namespace attend::test {
namespace {
TEST(CpuFlashSweep, Random) {
  const uint64_t seed = FreshSeed();
  const Attention* one;
  for (int n = 0; n < 400 * TestScale(); ++n) {
    const ProblemSpec spec = RandomSpec(seed + n);
    OwnedAttention owned = MakeAttention(spec, seed + n);
    one = &owned.attention;
    CpuFlash({&one, 1});
    const RowsReport report = CheckAllRows(owned.attention);
    ASSERT_TRUE(report.ok) << "ATTEND_TEST_SEED=" << seed + n << " " << Describe(spec) << "\n" << report.detail;
    ASSERT_TRUE(owned.GuardsIntact()) << Describe(spec);
  }
}
}  // namespace
}  // namespace attend::test
