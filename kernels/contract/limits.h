// SPDX-License-Identifier: Apache-2.0
//
// The one table of compile-time bounds. Every size that enters the library is checked against it
// (problem.cc), so code after that check may rely on these numbers.

#pragma once

#include <cstdint>

namespace attend {

inline constexpr int64_t kBatchMax = int64_t{1} << 20;        // sequences in one problem
inline constexpr int64_t kHeadsMax = int64_t{1} << 16;        // query heads
inline constexpr int64_t kLengthMax = int64_t{1} << 30;       // tokens of one sequence
inline constexpr int64_t kTotalTokensMax = int64_t{1} << 40;  // tokens of all packed sequences
inline constexpr int64_t kHeadDimMax = 256;                   // D and Dv
inline constexpr int64_t kPageRowsMin = 16;                   // keys in a page: a power of two
inline constexpr int64_t kPageRowsMax = 1024;

// Whether |scale * q.k| overflows fp32 is up to the caller's data (IEEE applies); these bounds only
// keep the parameters finite and meaningful.
inline constexpr float kSoftcapMin = 1e-6f;  // if not 0; 1 / softcap must not overflow
inline constexpr float kSoftcapMax = 1e6f;

// Scales that kernels may fold into the exponent's factor, with log2(e), if no other term applies
// to the scores. Within this range the factor is a normal number, and a difference of scores that
// overflows has weight 0 either way. Any other scale is applied to the scores first.
inline constexpr float kLateScaleMin = 0x1p-20f;
inline constexpr float kLateScaleMax = 0x1p20f;

// The largest scale, of either sign, at which scores may be sums of bf16 products in instructions
// that take subnormal numbers for 0.
inline constexpr float kFlushedScaleMax = 0x1p20f;

static_assert(kHeadDimMax <= 256, "the CUDA kernels size registers and shared memory for 256");
static_assert(kLengthMax <= INT32_MAX, "rows inside one sequence are indexed with 32 bits on CUDA");

}  // namespace attend
