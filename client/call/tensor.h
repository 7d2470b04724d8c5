// SPDX-License-Identifier: Apache-2.0
//
// Tensors in the client: HostTensor owns memory (files, answers, generated inputs), TensorRef
// refers to memory for a call. Plain values.

#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/memory/shared_memory.h"
#include "kernels/contract/dtype.h"
#include "kernels/util/status.h"

namespace attend::client {

// Bytes of a row-major tensor; rows of bits begin on byte boundaries. INVALID_ARGUMENT (naming
// `what`): a negative dimension, or a size beyond 64 bits.
Result<int64_t> TensorBytes(std::string_view what, DType dtype, const std::vector<int64_t>& shape);

// "[1, 8, 128, 64]".
std::string ShapeText(const std::vector<int64_t>& shape);

// "23.5 GiB" or "17 B".
std::string BytesText(int64_t bytes);

// "float16", "bfloat16" or "float32"; also "f16", "fp16", "bf16", "f32", "fp32".
Result<DType> ParseDType(std::string_view text);

// Row-major, little-endian, contiguous memory, shared by all copies of the handle.
struct HostTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  std::shared_ptr<std::byte[]> data;
  int64_t bytes = 0;

  // Allocates uninitialised memory for the shape. RESOURCE_EXHAUSTED: there is not enough.
  static Result<HostTensor> Make(std::string_view what, DType dtype, std::vector<int64_t> shape);
};

// A tensor that a call sends, or refers to if it is in shared memory. `owner` keeps the memory
// alive until gRPC has released it. A tensor without an owner is accepted only by the blocking
// Client::Call (client.h says why).
struct TensorRef {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<const void> owner;
  SharedPlace shared;  // no region: sent; a device's region: `data` may be a host copy

  TensorRef() = default;
  // Borrows; the caller keeps the memory alive.
  TensorRef(DType dtype, std::vector<int64_t> shape, const void* data, int64_t bytes)
      : dtype(dtype), shape(std::move(shape)), data(data), bytes(bytes) {}
  // `bytes` of `whole` from `offset` on, without a shape; shares ownership.
  TensorRef(const TensorRef& whole, int64_t offset, int64_t bytes)
      : dtype(whole.dtype),
        data(static_cast<const std::byte*>(whole.data) + offset),
        bytes(bytes),
        owner(whole.owner) {
    assert(offset >= 0 && bytes >= 0 && offset <= whole.bytes - bytes && "beyond the tensor");
  }
  // A tensor in shared memory; keeps the region alive. The bytes must not change until the call has
  // ended.
  TensorRef(DType dtype, std::vector<int64_t> shape, const SharedPlace& place, int64_t bytes)
      : dtype(dtype),
        shape(std::move(shape)),
        data(place.data()),
        bytes(bytes),
        owner(place.region),
        shared(place) {}
  // Shares ownership.
  TensorRef(const HostTensor& tensor)  // NOLINT: implicit
      : dtype(tensor.dtype),
        shape(tensor.shape),
        data(tensor.data.get()),
        bytes(tensor.bytes),
        owner(tensor.data) {}
};

}  // namespace attend::client
