// SPDX-License-Identifier: Apache-2.0
//
// Lets the few functions that define the contract (mask, sequences, softmax state) be shared by
// host and device code.

#pragma once

#if defined(__CUDACC__)
#define ATTEND_HD __host__ __device__
#else
#define ATTEND_HD
#endif
