// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by wgmma with dropout, for bf16.

#include "kernels/cuda/backward/sm90_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90DropoutGradientsBf16(Passes passes, cudaStream_t stream) {
  return backward::LaunchDropoutGradients<true>(passes, stream);
}

}  // namespace attend::cuda
