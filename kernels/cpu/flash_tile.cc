// SPDX-License-Identifier: Apache-2.0
//
// Compiles the SIMD code of cpu_flash once per instruction set and picks the best at run time.

#include "kernels/cpu/flash_tile.h"

#include "kernels/cpu/flash.h"

// Left out: SSSE3, which no machine of interest stops at, and vectors whose length the compiler
// does not know, as blocks of registers need arrays of vectors.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/flash_tile.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/cpu/flash_tile-inl.h"

#if HWY_ONCE
namespace attend {
namespace cpu_flash {

HWY_EXPORT(RunTile);
HWY_EXPORT(RunningTarget);

TileFunction ChooseTileFunction() {
  // Until the first dynamic call the table's first entry would choose at each call.
  if (!hwy::GetChosenTarget().IsInitialized()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  return &HWY_DYNAMIC_DISPATCH(RunTile);
}

}  // namespace cpu_flash

std::string CpuFlashTarget() {
  return hwy::TargetName(HWY_DYNAMIC_DISPATCH(cpu_flash::RunningTarget)());
}

}  // namespace attend
#endif  // HWY_ONCE
