// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by wgmma for bf16.

#include "kernels/cuda/backward/sm90_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90GradientsBf16(Passes passes, cudaStream_t stream) {
  return passes.front().attention.problem.dropout > 0
             ? LaunchSm90DropoutGradientsBf16(passes, stream)
             : backward::LaunchGradients<true>(passes, stream);
}

}  // namespace attend::cuda
