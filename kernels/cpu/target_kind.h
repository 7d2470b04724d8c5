// SPDX-License-Identifier: Apache-2.0
//
// Which of Highway's targets are compiled, and their kinds, for #if. Later versions of Highway add
// x86 targets (for Zen 4, Sapphire Rapids, AVX10) and prefer them where the ones known here would
// run too. Better targets are lower bits.

#pragma once

// Disabled: SSSE3, which no relevant machine is limited to, and vectors whose length is unknown at
// compile time, since register blocks are arrays of vectors. Include this file before Highway.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

#include "hwy/detect_targets.h"

// AVX-512 and later targets.
#define ATTEND_IS_AVX512(target) (HWY_ARCH_X86 && (target) <= HWY_AVX3)
// AVX2 and later targets.
#define ATTEND_IS_AVX2_OR_LATER(target) (HWY_ARCH_X86 && (target) <= HWY_AVX2)
