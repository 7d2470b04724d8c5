// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/lane/engine_copy.h"

#include <algorithm>

#include "kernels/cuda/lane/lane_tuning.h"

namespace attend::cuda {
namespace {

cudaError_t EnqueueRun(char* to, const char* from, int64_t bytes, cudaMemcpyKind kind,
                       cudaStream_t stream) {
  for (int64_t done = 0; done < bytes; done += kEngineCopyBytesMax) {
    const auto now = static_cast<size_t>(std::min(bytes - done, kEngineCopyBytesMax));
    const cudaError_t error = cudaMemcpyAsync(to + done, from + done, now, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t EnqueueFill(const ByteRuns& runs, int value, cudaStream_t stream) {
  const auto width = static_cast<size_t>(runs.width);
  if (runs.rows == 1) return cudaMemsetAsync(runs.data, value, width, stream);
  return cudaMemset2DAsync(runs.data, static_cast<size_t>(runs.pitch), value, width,
                           static_cast<size_t>(runs.rows), stream);
}

cudaError_t EnqueueCopy(const BoxCopy& copy, cudaMemcpyKind kind, cudaStream_t stream) {
  if (copy.rows == 1) return EnqueueRun(copy.to, copy.from, copy.width, kind, stream);
  const int64_t rows_max = kEngineCopyBytesMax / std::max<int64_t>(copy.width, 1);
  const auto pitch = static_cast<size_t>(copy.pitch);
  for (int64_t row = 0; row < copy.rows;) {
    const int64_t rows = std::min(std::max<int64_t>(rows_max, 1), copy.rows - row);
    char* const to = copy.to + row * copy.pitch;
    const char* const from = copy.from + row * copy.pitch;
    const cudaError_t error =
        rows_max <= 1 ? EnqueueRun(to, from, copy.width, kind, stream)
                      : cudaMemcpy2DAsync(to, pitch, from, pitch, static_cast<size_t>(copy.width),
                                          static_cast<size_t>(rows), kind, stream);
    if (error != cudaSuccess) return error;
    row += rows;
  }
  return cudaSuccess;
}

}  // namespace attend::cuda
