// SPDX-License-Identifier: Apache-2.0
//
// Kinds of Highway's targets, for #if. Later versions of Highway have more targets for x86 (of Zen
// 4, Sapphire Rapids, AVX10), and pick them where this one's would run too. Better targets are
// lower bits.

#pragma once

#include "hwy/detect_targets.h"

// AVX-512, and all that came after it.
#define ATTEND_IS_AVX512(target) (HWY_ARCH_X86 && (target) <= HWY_AVX3)
// The same from AVX2 on.
#define ATTEND_IS_AVX2_OR_LATER(target) (HWY_ARCH_X86 && (target) <= HWY_AVX2)
