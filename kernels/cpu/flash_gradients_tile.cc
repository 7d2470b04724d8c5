// SPDX-License-Identifier: Apache-2.0
//
// Compiles the SIMD code of the backward pass once per instruction set and selects the best at run
// time.

#include "kernels/cpu/flash_gradients_tile.h"

#include "kernels/cpu/target_kind.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/flash_gradients_tile.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/cpu/flash_gradients_amx-inl.h"
#include "kernels/cpu/flash_gradients_tile-inl.h"

#if HWY_ONCE
namespace attend::cpu_flash {

HWY_EXPORT(RunGradients);
HWY_EXPORT(RunsTiles);
HWY_EXPORT(StoreQueryGradients);
HWY_EXPORT(StoreKeyGradients);
HWY_EXPORT(SumSinkGradient);

GradientFunctions ChooseGradientFunctions() {
  // Before the first dynamic call, the table's first entry would select a target at each call.
  if (!hwy::GetChosenTarget().IsInitialized()) {
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  return {HWY_DYNAMIC_DISPATCH(RunsTiles)(), &HWY_DYNAMIC_DISPATCH(RunGradients),
          &HWY_DYNAMIC_DISPATCH(StoreQueryGradients), &HWY_DYNAMIC_DISPATCH(StoreKeyGradients),
          &HWY_DYNAMIC_DISPATCH(SumSinkGradient)};
}

}  // namespace attend::cpu_flash
#endif  // HWY_ONCE
