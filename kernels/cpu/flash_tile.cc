// SPDX-License-Identifier: Apache-2.0
//
// Compiles the SIMD code of cpu_flash once per instruction set and selects the best at run time.

#include "kernels/cpu/flash_tile.h"

#include <atomic>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/target_kind.h"

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
  // Before the first dynamic call, the table's first entry would select a target at each call.
  if (!hwy::GetChosenTarget().IsInitialized()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  return &HWY_DYNAMIC_DISPATCH(RunTile);
}

namespace {

std::atomic<bool> pairs_used{true};

// AVX512_BF16, with an operating system that saves its registers.
bool MachineHasPairs() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

}  // namespace

bool HasBf16Pairs() {
  static const bool has = MachineHasPairs();
  return has && pairs_used.load(std::memory_order_relaxed);
}

void UseBf16PairsForTest(bool use) { pairs_used.store(use); }

namespace {

// Within the functions' namespace: where there is one target, Highway puts its name before theirs.
int64_t ChosenTarget() { return HWY_DYNAMIC_DISPATCH(RunningTarget)(); }

}  // namespace
}  // namespace cpu_flash

std::string CpuFlashTarget() {
  const int64_t target = cpu_flash::ChosenTarget();
  const bool pairs = ATTEND_IS_AVX512(target) && cpu_flash::HasBf16Pairs();
  return std::string(hwy::TargetName(target)) + (pairs ? "_BF16" : "");
}

}  // namespace attend
#endif  // HWY_ONCE
