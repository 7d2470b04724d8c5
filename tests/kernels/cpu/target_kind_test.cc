// SPDX-License-Identifier: Apache-2.0
//
// Targets of later Highway versions are attributed to the right kind of machine.

#include "kernels/cpu/target_kind.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace attend::test {
namespace {

#if HWY_ARCH_X86

// Numbered as in Highway 1.2.
constexpr int64_t kAvx10 = int64_t{1} << 3;
constexpr int64_t kSapphireRapids = int64_t{1} << 4;
constexpr int64_t kZen4 = int64_t{1} << 6;

TEST(TargetKind, LaterTargetsOfX86HaveAvx512) {
  for (const int64_t target :
       {kAvx10, kSapphireRapids, kZen4, int64_t{HWY_AVX3_DL}, int64_t{HWY_AVX3}}) {
    EXPECT_TRUE(ATTEND_IS_AVX512(target)) << target;
    EXPECT_TRUE(ATTEND_IS_AVX2_OR_LATER(target)) << target;
  }
  EXPECT_FALSE(ATTEND_IS_AVX512(HWY_AVX2));
  EXPECT_TRUE(ATTEND_IS_AVX2_OR_LATER(HWY_AVX2));
  for (const int64_t target : {int64_t{HWY_SSE4}, int64_t{HWY_SCALAR}}) {
    EXPECT_FALSE(ATTEND_IS_AVX512(target)) << target;
    EXPECT_FALSE(ATTEND_IS_AVX2_OR_LATER(target)) << target;
  }
}

#else

TEST(TargetKind, OtherProcessorsHaveNoX86Targets) {
  EXPECT_FALSE(ATTEND_IS_AVX512(HWY_STATIC_TARGET));
  EXPECT_FALSE(ATTEND_IS_AVX2_OR_LATER(HWY_STATIC_TARGET));
}

#endif

}  // namespace
}  // namespace attend::test
