// SPDX-License-Identifier: Apache-2.0
//
// pinned_copies.h in a build with CUDA.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/cuda/runtime/cuda_status.h"
#include "tests/bench/service/pinned_copies.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

class CudaCopies final : public PinnedCopies {
 public:
  CudaCopies(int device, int64_t in_bytes, int64_t out_bytes)
      : device_(device),
        in_bytes_(static_cast<size_t>(in_bytes)),
        out_bytes_(static_cast<size_t>(out_bytes)) {}

  ~CudaCopies() override {
    // All of these accept null.
    cudaFreeHost(in_);
    cudaFreeHost(out_);
    cudaFree(on_device_);
    if (up_ != nullptr) cudaStreamDestroy(up_);
    if (down_ != nullptr) cudaStreamDestroy(down_);
  }

  Status Prepare() {
    ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaSetDevice(device_), "set device"));
    for (const cudaError_t error : {cudaHostAlloc(&in_, in_bytes_, cudaHostAllocDefault),
                                    cudaHostAlloc(&out_, out_bytes_, cudaHostAllocDefault),
                                    cudaMalloc(&on_device_, in_bytes_),
                                    cudaStreamCreateWithFlags(&up_, cudaStreamNonBlocking),
                                    cudaStreamCreateWithFlags(&down_, cudaStreamNonBlocking)}) {
      ATTEND_RETURN_IF_ERROR(cuda::ToStatus(error, "prepare copies"));
    }
    for (size_t i = 0; i < in_bytes_; ++i) static_cast<uint8_t*>(in_)[i] = i * 131 + (i >> 12);
    std::memset(out_, 0, out_bytes_);
    // The copies from the device must return these bytes.
    return cuda::ToStatus(cudaMemcpy(on_device_, in_, in_bytes_, cudaMemcpyHostToDevice), "copy");
  }

  Result<Sample> Drive(double seconds) override {
    Sample sample;
    const Clock::time_point begin = Clock::now();
    do {
      for (const cudaError_t error :
           {cudaMemcpyAsync(on_device_, in_, in_bytes_, cudaMemcpyHostToDevice, up_),
            cudaMemcpyAsync(out_, on_device_, out_bytes_, cudaMemcpyDeviceToHost, down_),
            cudaStreamSynchronize(up_), cudaStreamSynchronize(down_)}) {
        ATTEND_RETURN_IF_ERROR(cuda::ToStatus(error, "copy"));
      }
      ++sample.calls;
      sample.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (sample.seconds < seconds);
    sample.bytes = sample.calls * static_cast<int64_t>(in_bytes_ + out_bytes_);
    if (std::memcmp(in_, out_, out_bytes_) != 0) return Internal("the copied bytes differ");
    return sample;
  }

 private:
  const int device_;
  const size_t in_bytes_;
  const size_t out_bytes_;
  void* in_ = nullptr;
  void* out_ = nullptr;
  void* on_device_ = nullptr;
  cudaStream_t up_ = nullptr;
  cudaStream_t down_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<PinnedCopies>> PinnedCopies::Make(const std::string& device,
                                                         int64_t in_bytes, int64_t out_bytes) {
  if (in_bytes < 1 || out_bytes < 1 || out_bytes > in_bytes) {
    return InvalidArgument("in_bytes must be at least out_bytes, and both at least 1");
  }
  auto copies = std::make_unique<CudaCopies>(std::atoi(device.c_str() + device.find(':') + 1),
                                             in_bytes, out_bytes);
  ATTEND_RETURN_IF_ERROR(copies->Prepare());
  return std::unique_ptr<PinnedCopies>(std::move(copies));
}

}  // namespace attend::bench
