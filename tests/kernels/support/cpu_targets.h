// SPDX-License-Identifier: Apache-2.0
//
// Runs a test of cpu_flash once per instruction set that this machine has.

#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <functional>
#include <set>
#include <string>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_tile.h"

namespace attend::test {

// Runs `body` with each instruction set that was compiled in and runs here, by name.
inline void ForEachTarget(const std::function<void()>& body) {
  std::set<std::string> seen;
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t bit = 1; bit > 0; bit <<= 1) {
    if ((supported & bit) == 0) continue;
    hwy::SetSupportedTargetsForTest(bit);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    // Targets that were not compiled in fall back to one that was.
    for (const bool pairs : {false, true}) {
      cpu_flash::UseBf16PairsForTest(pairs);
      if (!seen.insert(CpuFlashTarget()).second) continue;
      SCOPED_TRACE("target " + CpuFlashTarget());
      body();
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  EXPECT_TRUE(seen.count(CpuFlashTarget())) << "the best target was not tested";
}

}  // namespace attend::test
