// SPDX-License-Identifier: Apache-2.0

#include "server/wire/tensor_rules.h"

#include <algorithm>
#include <optional>

#include "kernels/util/counted.h"

namespace attend {
namespace {

using Text = std::string;

Text ShapeText(const v1::Tensor& tensor) {
  constexpr int kShown = 8;
  Text text = "[";
  for (int i = 0; i < std::min(tensor.shape_size(), kShown); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.shape(i));
  }
  return text + (tensor.shape_size() > kShown ? ", ...]" : "]");
}

// The size of a tensor in bytes; empty on overflow. For bits, also empty if their number overflows,
// because strides count bits. Each row of bits begins on a byte. Dimensions must not be negative.
std::optional<int64_t> BytesOf(const v1::Tensor& tensor, DType dtype) {
  const auto& shape = tensor.shape();
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  const bool bits = dtype == DType::kBit;
  int64_t size = bits ? 8 : DTypeBytes(dtype);
  for (int i = 0; i < shape.size(); ++i) {
    const int64_t factor =
        bits && i + 1 == shape.size() ? RowBytes(dtype, shape.Get(i)) : shape.Get(i);
    if (__builtin_mul_overflow(size, factor, &size)) return std::nullopt;
  }
  return bits ? size / 8 : size;
}

// Fields 7 to 15 of Tensor are reserved for sources that later servers may support.
Status CheckSource(const Text& name, const v1::Tensor& tensor) {
  const google::protobuf::UnknownFieldSet& unknown =
      v1::Tensor::GetReflection()->GetUnknownFields(tensor);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (number >= 7 && number <= 15) {
      return Unimplemented(
          name + ".source is field " + std::to_string(number) +
          ", but this server supports only inline_bytes, chunked and shared_memory");
    }
  }
  return Status();
}

}  // namespace

Status WrongEnum(std::string_view field, int value, std::string_view allowed) {
  return InvalidArgument(Text(field) + " is " + std::to_string(value) + ", must be " +
                         Text(allowed));
}

Status CheckTensor(const Text& name, const v1::Tensor& tensor, int rank, std::string_view dims,
                   DType& dtype, int64_t& bytes, Bits bits) {
  const bool taken = bits == Bits::kTaken;
  if (!IsDType(tensor.dtype()) && !(taken && tensor.dtype() == v1::DTYPE_BIT)) {
    return WrongEnum(name + ".dtype", tensor.dtype(),
                     taken ? "FLOAT16 (1), BFLOAT16 (2), FLOAT32 (3) or BIT (4)"
                           : "FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)");
  }
  dtype = static_cast<DType>(tensor.dtype());
  if (tensor.shape_size() != rank) {
    return InvalidArgument(name + ".shape " + ShapeText(tensor) + " has " +
                           std::to_string(tensor.shape_size()) + " dimensions, must have " +
                           std::to_string(rank) + ": " + Text(dims));
  }
  for (int i = 0; i < rank; ++i) {
    const int64_t dim = tensor.shape(i);
    if (dim < 0) {
      return InvalidArgument(name + ".shape[" + std::to_string(i) + "] is " + std::to_string(dim) +
                             ", must be at least 0");
    }
  }
  const std::optional<int64_t> product = BytesOf(tensor, dtype);
  if (!product) {
    const Text size = dtype == DType::kBit
                          ? Text("1 bit an element, in rows of whole bytes,")
                          : std::to_string(DTypeBytes(dtype)) + " bytes an element";
    return InvalidArgument(name + ".shape " + ShapeText(tensor) + " times " + size +
                           " overflows 64 bits");
  }
  bytes = *product;
  if (tensor.has_byte_length() && tensor.byte_length() != static_cast<uint64_t>(bytes)) {
    return InvalidArgument(name + ".byte_length is " + std::to_string(tensor.byte_length()) +
                           ", must be " + std::to_string(bytes) + " for shape " +
                           ShapeText(tensor) + " of " + Text(DTypeName(dtype)));
  }
  return CheckSource(name, tensor);
}

Status MustHaveDType(const Text& name, DType dtype, const Text& other, DType expected) {
  if (dtype == expected) return Status();
  return InvalidArgument(name + ".dtype is " + Text(DTypeName(dtype)) + ", must equal " + other +
                         " " + Text(DTypeName(expected)));
}

Status MustAgree(const Text& name, const v1::Tensor& tensor, int index, const Text& what,
                 const Text& other, int64_t expected) {
  if (tensor.shape(index) == expected) return Status();
  return InvalidArgument(name + ".shape[" + std::to_string(index) + "] (" + what + ") is " +
                         std::to_string(tensor.shape(index)) + ", must equal " + Possessive(other) +
                         " " + std::to_string(expected));
}

}  // namespace attend
