// SPDX-License-Identifier: Apache-2.0
//
// Which of Highway's targets are compiled, and their kinds, for #if. Later versions of Highway have
// more targets for x86 (of Zen 4, Sapphire Rapids, AVX10), and pick them where this one's would run
// too. Better targets are lower bits.

#pragma once

// Left out: SSSE3, which no machine of interest stops at, and vectors whose length the compiler
// does not know, as blocks of registers need arrays of vectors. Include this file before Highway.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

#include "hwy/detect_targets.h"

// AVX-512, and all that came after it.
#define ATTEND_IS_AVX512(target) (HWY_ARCH_X86 && (target) <= HWY_AVX3)
// The same from AVX2 on.
#define ATTEND_IS_AVX2_OR_LATER(target) (HWY_ARCH_X86 && (target) <= HWY_AVX2)
