// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/cuda_arena.h"

#include <string>

#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/runtime/device_scope.h"

namespace attend::cuda {

Result<std::unique_ptr<DeviceArena>> CudaArena::Make(const DeviceInfo& device,
                                                     CompletionPoller& poller, int64_t bytes) {
  std::unique_ptr<CudaArena> arena(new CudaArena(device, poller));
  const DeviceScope scope(device.index);
  ATTEND_RETURN_IF_ERROR(arena->Note(scope.error(), "choosing the device"));
  ATTEND_RETURN_IF_ERROR(arena->Note(
      cudaStreamCreateWithFlags(&arena->stream_, cudaStreamNonBlocking), "making a stream"));
  void* data = nullptr;
  ATTEND_RETURN_IF_ERROR(
      arena->Note(cudaMalloc(&data, static_cast<size_t>(bytes)), "allocating an arena"));
  arena->memory_ = {data, bytes};
  return std::unique_ptr<DeviceArena>(std::move(arena));
}

CudaArena::~CudaArena() {
  const DeviceScope scope(device_.index);
  if (memory_.data != nullptr) (void)cudaFree(memory_.data);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Status CudaArena::Copy(std::span<const HostPiece> pieces) {
  if (pieces.empty()) return Status();
  const DeviceScope scope(device_.index);
  cudaError_t error = scope.error();
  for (const HostPiece& piece : pieces) {
    if (error != cudaSuccess) break;
    error = cudaMemcpyAsync(piece.to, piece.from, static_cast<size_t>(piece.bytes),
                            cudaMemcpyDefault, stream_);
  }
  // Also after an error: enqueued copies write to the caller's memory.
  const cudaError_t ended = cudaStreamSynchronize(stream_);
  return Note(error != cudaSuccess ? error : ended, "copying pages");
}

Status CudaArena::Note(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  (void)cudaGetLastError();
  if (IsSticky(error)) poller_.ReportLoss(error);
  return ToStatus(error, std::string(what) + " on " + device_.name);
}

}  // namespace attend::cuda
