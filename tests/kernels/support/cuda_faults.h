// SPDX-License-Identifier: Apache-2.0
//
// The N-th call of a function of the CUDA runtime fails, and does nothing. For programs whose link
// leads the functions of WrappedCudaCalls here (--wrap); CUDA's runtime is linked statically, so
// nothing else comes between. Thread-safe.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace attend::test {

// The functions that can fail so.
const std::vector<std::string>& WrappedCudaCalls();

// From now on the N-th call (1 = the next) of this function fails with `error`; 0: none. One fault
// at a time.
void FailCudaCall(const std::string& function, int64_t n, cudaError_t error);
// Whether it was met.
bool CudaFaultWasMet();

}  // namespace attend::test
