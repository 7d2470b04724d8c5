// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by wgmma for fp16.

#include "kernels/cuda/backward/sm90_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90GradientsF16(Passes passes, cudaStream_t stream) {
  return passes.front().attention.problem.dropout > 0
             ? LaunchSm90DropoutGradientsF16(passes, stream)
             : backward::LaunchGradients<false>(passes, stream);
}

}  // namespace attend::cuda
