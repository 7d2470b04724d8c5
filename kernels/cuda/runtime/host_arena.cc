// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/host_arena.h"

#include <algorithm>

namespace attend::cuda {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

HostArena::~HostArena() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

cudaError_t HostArena::Reset(int64_t bytes) {
  taken_ = 0;
  if (bytes <= capacity_) return cudaSuccess;
  const int64_t capacity = std::max(bytes, 2 * capacity_);
  if (data_ != nullptr) (void)cudaFreeHost(data_);
  data_ = nullptr;
  capacity_ = 0;
  void* data = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&data, static_cast<size_t>(capacity), cudaHostAllocPortable);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return error;
  }
  data_ = static_cast<char*>(data);
  capacity_ = capacity;
  return cudaSuccess;
}

char* HostArena::Take(int64_t bytes) {
  const int64_t begin = (taken_ + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes < 0 || begin > capacity_ || bytes > capacity_ - begin) return nullptr;
  taken_ = begin + bytes;
  return data_ + begin;
}

}  // namespace attend::cuda
