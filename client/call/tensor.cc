// SPDX-License-Identifier: Apache-2.0

#include "client/call/tensor.h"

#include <array>
#include <cstdio>
#include <new>

namespace attend::client {

Result<int64_t> TensorBytes(std::string_view what, DType dtype, const std::vector<int64_t>& shape) {
  const bool bits = dtype == DType::kBit;
  int64_t bytes = bits ? 1 : DTypeBytes(dtype);
  bool empty = false;
  for (const int64_t dim : shape) {
    if (dim < 0) {
      return InvalidArgument(std::string(what) + ": shape " + ShapeText(shape) +
                             " has a dimension below 0");
    }
    empty = empty || dim == 0;
  }
  if (empty) return int64_t{0};
  for (size_t i = 0; i < shape.size(); ++i) {
    const bool row = bits && i + 1 == shape.size();
    if (__builtin_mul_overflow(bytes, row ? RowBytes(dtype, shape[i]) : shape[i], &bytes)) {
      return InvalidArgument(std::string(what) + ": bytes of shape " + ShapeText(shape) +
                             " overflow 64 bits");
    }
  }
  return bytes;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::string BytesText(int64_t bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double amount = static_cast<double>(bytes);
  size_t unit = 0;
  for (; amount >= 1024 && unit + 1 < kUnits.size(); ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, amount < 1000 ? "%.4g %s" : "%.0f %s", amount, kUnits[unit]);
  return text;
}

Result<DType> ParseDType(std::string_view text) {
  if (text == "float16" || text == "f16" || text == "fp16") return DType::kFloat16;
  if (text == "bfloat16" || text == "bf16") return DType::kBFloat16;
  if (text == "float32" || text == "f32" || text == "fp32") return DType::kFloat32;
  return InvalidArgument("dtype is \"" + std::string(text) +
                         "\", must be float16, bfloat16 or float32");
}

Result<HostTensor> HostTensor::Make(std::string_view what, DType dtype,
                                    std::vector<int64_t> shape) {
  const Result<int64_t> bytes = TensorBytes(what, dtype, shape);
  if (!bytes.ok()) return bytes.status();
  if (*bytes > PTRDIFF_MAX / 2) {
    return InvalidArgument(std::string(what) + ": shape " + ShapeText(shape) + " takes " +
                           std::to_string(*bytes) + " bytes, more than an address space holds");
  }
  HostTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes = *bytes;
  try {
    tensor.data = std::make_shared_for_overwrite<std::byte[]>(static_cast<size_t>(*bytes));
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(std::string(what) + ": shape " + ShapeText(tensor.shape) + " takes " +
                             BytesText(*bytes) + ", more than the memory available");
  }
  return tensor;
}

}  // namespace attend::client
