// SPDX-License-Identifier: Apache-2.0
//
// Memory management of OwnedAttention.

#include <algorithm>
#include <cstring>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr int kGuard = 0xa5;

void* Element(const void* data, DType dtype, int64_t index) {
  return static_cast<std::byte*>(const_cast<void*>(data)) + index * DTypeBytes(dtype);
}

}  // namespace

WorkItem OwnedAttention::Item(const Selection& selection) const {
  return WorkItem{attention, selection, {input}, {output}};
}

void OwnedAttention::ResetOutput() {
  std::memset(output.data, kGuard, static_cast<size_t>(output.bytes));
  PoisonOutput(attention);
}

std::vector<std::byte> OwnedAttention::OutputBytes() const {
  const auto* data = static_cast<const std::byte*>(output.data);
  return std::vector<std::byte>(data, data + output.bytes);
}

bool OwnedAttention::GuardsIntact() const {
  // On a copy, what may be written is overwritten with the pattern; then all of it must match.
  std::vector<std::byte> bytes = OutputBytes();
  const auto* base = static_cast<const std::byte*>(output.data);
  const Problem& p = attention.problem;
  const int64_t size = DTypeBytes(p.o_dtype());
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(attention, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < s.q_rows; ++i) {
        const TensorView& o = attention.o;
        const int64_t row = b * o.stride_b + h * o.stride_h + (s.q_row + i) * o.stride_l;
        const int64_t at = static_cast<const std::byte*>(o.data) - base + row * size;
        std::memset(bytes.data() + at, kGuard, static_cast<size_t>(p.dim_v * size));
        if (attention.lse == nullptr) continue;
        const float* lse =
            attention.lse + b * attention.lse_stride_b + h * attention.lse_stride_h + s.q_row + i;
        std::memset(bytes.data() + (reinterpret_cast<const std::byte*>(lse) - base), kGuard, 4);
      }
    }
  }
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{kGuard}; });
}

void* OwnedAttention::Q(int64_t b, int64_t h, int64_t i, int64_t d) {
  return Element(attention.q.data, attention.problem.dtype,
                 b * attention.q.stride_b + h * attention.q.stride_h +
                     (SequenceOf(attention, b).q_row + i) * attention.q.stride_l + d);
}

void* OwnedAttention::K(int64_t b, int64_t h_kv, int64_t j, int64_t d) {
  const ConstTensorView& t = attention.k;
  return Element(t.data, attention.problem.dtype,
                 KeyElement(attention, t, SequenceOf(attention, b), b, h_kv, j) + d);
}

void* OwnedAttention::V(int64_t b, int64_t h_kv, int64_t j, int64_t d) {
  const ConstTensorView& t = attention.v;
  return Element(t.data, attention.problem.dtype,
                 KeyElement(attention, t, SequenceOf(attention, b), b, h_kv, j) + d);
}

void* OwnedAttention::O(int64_t b, int64_t h, int64_t i, int64_t d) {
  const TensorView& t = attention.o;
  const int64_t row = SequenceOf(attention, b).q_row + i;
  return Element(t.data, attention.problem.o_dtype(),
                 b * t.stride_b + h * t.stride_h + row * t.stride_l + d);
}

}  // namespace attend::test
