// SPDX-License-Identifier: Apache-2.0

#include "server/wire/tensor_rules.h"

#include <algorithm>

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

// Fields 7 to 15 of Tensor are reserved for places of bytes that later servers may support.
Status CheckSource(const Text& name, const v1::Tensor& tensor) {
  const google::protobuf::UnknownFieldSet& unknown =
      v1::Tensor::GetReflection()->GetUnknownFields(tensor);
  for (int i = 0; i < unknown.field_count(); ++i) {
    const int number = unknown.field(i).number();
    if (number >= 7 && number <= 15) {
      return Unimplemented(name + ".source is field " + std::to_string(number) +
                           ", this server knows inline_bytes, chunked and shared_memory");
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
                   DType& dtype, int64_t& bytes) {
  if (!IsDType(tensor.dtype())) {
    return WrongEnum(name + ".dtype", tensor.dtype(), "FLOAT16 (1), BFLOAT16 (2) or FLOAT32 (3)");
  }
  dtype = static_cast<DType>(tensor.dtype());
  if (tensor.shape_size() != rank) {
    return InvalidArgument(name + ".shape " + ShapeText(tensor) + " has " +
                           std::to_string(tensor.shape_size()) + " dimensions, must have " +
                           std::to_string(rank) + ": " + Text(dims));
  }
  bytes = DTypeBytes(dtype);
  bool empty = false;
  bool overflow = false;
  for (int i = 0; i < rank; ++i) {
    const int64_t dim = tensor.shape(i);
    if (dim < 0) {
      return InvalidArgument(name + ".shape[" + std::to_string(i) + "] is " + std::to_string(dim) +
                             ", must be at least 0");
    }
    empty |= dim == 0;
    overflow |= __builtin_mul_overflow(bytes, dim, &bytes);
  }
  if (empty) {
    bytes = 0;
  } else if (overflow) {
    return InvalidArgument(name + ".shape " + ShapeText(tensor) + " times " +
                           std::to_string(DTypeBytes(dtype)) +
                           " bytes an element overflows 64 bits");
  }
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
                         std::to_string(tensor.shape(index)) + ", must equal " + other + "'s " +
                         std::to_string(expected));
}

}  // namespace attend
