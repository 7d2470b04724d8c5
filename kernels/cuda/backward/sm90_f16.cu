// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by wgmma for fp16.

#include "kernels/cuda/backward/sm90_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90GradientsF16(const BackwardPass& pass, cudaStream_t stream) {
  return pass.attention.problem.dropout > 0 ? LaunchSm90DropoutGradientsF16(pass, stream)
                                            : backward::LaunchGradients<false>(pass, stream);
}

}  // namespace attend::cuda
