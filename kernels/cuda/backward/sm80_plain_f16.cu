// SPDX-License-Identifier: Apache-2.0
//
// Instances of the backward pass by mma.sync for fp16, without score terms.

#include "kernels/cuda/backward/sm80_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm80PlainF16(Passes passes, Sm80Task task, cudaStream_t stream) {
  return backward::LaunchMma<__half, backward::Class::kPlain>(passes, task, stream);
}

}  // namespace attend::cuda
