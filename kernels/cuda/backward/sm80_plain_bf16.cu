// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by mma.sync for bf16, without score terms.

#include "kernels/cuda/backward/sm80_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm80PlainBf16(Passes passes, cudaStream_t stream) {
  return backward::LaunchMma<__nv_bfloat16, backward::Class::kPlain>(passes, stream);
}

}  // namespace attend::cuda
