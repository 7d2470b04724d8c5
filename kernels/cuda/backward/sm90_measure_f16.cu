// SPDX-License-Identifier: Apache-2.0
//
// Instances of the measuring kernel by wgmma for fp16.

#include "kernels/cuda/backward/sm90_measure_launch.cuh"

namespace attend::cuda {

cudaError_t LaunchSm90MeasureF16(Passes passes, cudaStream_t stream) {
  return backward::LaunchMeasure<false>(passes, stream);
}

}  // namespace attend::cuda
