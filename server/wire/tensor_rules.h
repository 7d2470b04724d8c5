// SPDX-License-Identifier: Apache-2.0
//
// The rules for a single tensor of a request, and for its agreement with another; used by
// validate.cc and validate_backward.cc. Pure.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "attend/v1/attention.pb.h"
#include "kernels/contract/dtype.h"
#include "kernels/util/status.h"
#include "server/request/request.h"

namespace attend {

// INVALID_ARGUMENT: the value of `field` is not in its enum, or not `allowed`.
Status WrongEnum(std::string_view field, int value, std::string_view allowed);

// Checks dtype, shape, byte length and source of a tensor. Sets `bytes` to its size. `bits`:
// whether DTYPE_BIT is allowed.
enum class Bits { kRefused, kTaken };
Status CheckTensor(const std::string& name, const v1::Tensor& tensor, int rank,
                   std::string_view dims, DType& dtype, int64_t& bytes, Bits bits = Bits::kRefused);

// Checks that the tensor's dtype is that of `other`.
Status MustHaveDType(const std::string& name, DType dtype, const std::string& other,
                     DType expected);

// Checks that shape[index] of `name`, described by `what`, equals that of the tensor `other`.
Status MustAgree(const std::string& name, const v1::Tensor& tensor, int index,
                 const std::string& what, const std::string& other, int64_t expected);

// The index of each dimension in a layout's shape; -1: none.
struct Dims {
  int rank;
  int b, h, l, d;
  std::string_view text_q, text_k, text_v, text_o;
};

constexpr Dims DimsOf(Layout layout) {
  switch (layout) {
    case Layout::kBlhd:
      return {4,
              0,
              2,
              1,
              3,
              "[B, Lq, Hq, D]",
              "[B, Lk, Hkv, D]",
              "[B, Lk, Hkv, Dv]",
              "[B, Lq, Hq, Dv]"};
    case Layout::kLhd:
      return {3,
              -1,
              1,
              0,
              2,
              "[q rows, Hq, D]",
              "[kv rows, Hkv, D]",
              "[kv rows, Hkv, Dv]",
              "[q rows, Hq, Dv]"};
    case Layout::kBhld:
      break;
  }
  return {
      4, 0, 1, 2, 3, "[B, Hq, Lq, D]", "[B, Hkv, Lk, D]", "[B, Hkv, Lk, Dv]", "[B, Hq, Lq, Dv]"};
}

// The strides of a dense tensor in `layout`. The sizes must have passed Check.
template <class View>
void SetStrides(Layout layout, int64_t heads, int64_t length, int64_t dim, View& view) {
  const bool heads_outside = layout == Layout::kBhld;
  view.stride_b = layout == Layout::kLhd ? 0 : heads * length * dim;
  view.stride_h = heads_outside ? length * dim : dim;
  view.stride_l = heads_outside ? dim : heads * dim;
}

}  // namespace attend
