// SPDX-License-Identifier: Apache-2.0
//
// Compiles the SIMD code of cpu_flash's decoding path once per instruction set and selects the best
// at run time.

#include "kernels/cpu/decode.h"

#include "kernels/cpu/target_kind.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/cpu/decode-inl.h"

#if HWY_ONCE
namespace attend::cpu_flash {

HWY_EXPORT(DecodeSplit);
HWY_EXPORT(FinishDecode);
HWY_EXPORT(DecodeWhole);

DecodeFunctions ChooseDecodeFunctions() {
  return {&HWY_DYNAMIC_DISPATCH(DecodeSplit), &HWY_DYNAMIC_DISPATCH(FinishDecode),
          &HWY_DYNAMIC_DISPATCH(DecodeWhole)};
}

}  // namespace attend::cpu_flash
#endif  // HWY_ONCE
