// SPDX-License-Identifier: Apache-2.0
//
// Tensors as the client sees them: memory that it owns (HostTensor: files, answers, generated
// inputs) and memory that a call refers to (TensorRef). Plain values, no thread of their own.

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

// Bytes of a row-major tensor, whose rows begin on bytes if it is of bits, or INVALID_ARGUMENT
// (naming `what`) for a negative dimension or a size beyond 64 bits.
Result<int64_t> TensorBytes(std::string_view what, DType dtype, const std::vector<int64_t>& shape);

// "[1, 8, 128, 64]".
std::string ShapeText(const std::vector<int64_t>& shape);

// "23.5 GiB" or "17 B".
std::string BytesText(int64_t bytes);

// "float16", "bfloat16" or "float32"; short forms "f16", "fp16", "bf16", "f32", "fp32" too.
Result<DType> ParseDType(std::string_view text);

// Row-major, little-endian, contiguous memory that lives as long as any copy of the handle.
struct HostTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  std::shared_ptr<std::byte[]> data;
  int64_t bytes = 0;

  // Allocates memory for the shape, uninitialised. RESOURCE_EXHAUSTED if there is not enough.
  static Result<HostTensor> Make(std::string_view what, DType dtype, std::vector<int64_t> shape);
};

// A tensor that a call sends, or only names if it is in shared memory. `owner` keeps the memory
// alive until gRPC has released it. Without an owner, only the blocking Client::Call accepts it
// (client.h says why).
struct TensorRef {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<const void> owner;
  SharedPlace shared;  // no region: sent; a device's region: `data` may be a copy on the host

  TensorRef() = default;
  // Borrows; the caller keeps the memory.
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
  // A tensor in shared memory, which it keeps alive. The bytes must not change until the call has
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
