// SPDX-License-Identifier: Apache-2.0
//
// Kinds of Highway's targets, for #if. Later versions of Highway add x86 targets (for Zen 4,
// Sapphire Rapids, AVX10) and prefer them where the ones known here would run too. Better targets
// are lower bits.

#pragma once

#include "hwy/detect_targets.h"

// AVX-512 and later targets.
#define ATTEND_IS_AVX512(target) (HWY_ARCH_X86 && (target) <= HWY_AVX3)
// AVX2 and later targets.
#define ATTEND_IS_AVX2_OR_LATER(target) (HWY_ARCH_X86 && (target) <= HWY_AVX2)
