// SPDX-License-Identifier: Apache-2.0
//
// Lets host and device code share the few functions that define the contract (mask, sequences,
// softmax state).

#pragma once

#if defined(__CUDACC__)
#define ATTEND_HD __host__ __device__
#else
#define ATTEND_HD
#endif
