// SPDX-License-Identifier: Apache-2.0
//
// Page-locked memory for data that the device reads while a batch runs (lists of attentions, of
// copies). One thread at a time.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attend::cuda {

class HostArena {
 public:
  HostArena() = default;
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Discards everything taken, which the device must have read. Then makes room for `bytes`: to
  // grow, it page-locks at least twice the previous size, which may wait for the device. On failure
  // the arena is empty and Take returns null.
  cudaError_t Reset(int64_t bytes);

  // 256-byte aligned; null if there is no room.
  char* Take(int64_t bytes);

  int64_t capacity() const { return capacity_; }

 private:
  char* data_ = nullptr;
  int64_t capacity_ = 0;
  int64_t taken_ = 0;
};

}  // namespace attend::cuda
