// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by wgmma with dropout, for fp16.

#include "kernels/cuda/backward/sm90_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90DropoutGradientsF16(Passes passes, cudaStream_t stream) {
  return backward::LaunchDropoutGradients<false>(passes, stream);
}

}  // namespace attend::cuda
