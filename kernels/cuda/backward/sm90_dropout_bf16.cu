// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by wgmma with dropout, for bf16.

#include "kernels/cuda/backward/sm90_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90DropoutGradientsBf16(const BackwardPass& pass, cudaStream_t stream) {
  return backward::LaunchDropoutGradients<true>(pass, stream);
}

}  // namespace attend::cuda
