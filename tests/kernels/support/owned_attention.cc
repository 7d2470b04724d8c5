// SPDX-License-Identifier: Apache-2.0
//
// Memory management of OwnedAttention.

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

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

void SetSpecials(OwnedAttention* owned, uint64_t seed) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kSpecials[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity,
                                 0x1p-130f};
  std::mt19937_64 engine(seed);
  const auto draw = [&](int64_t n) {
    return static_cast<int64_t>(engine() % static_cast<uint64_t>(n));
  };
  const Problem& p = owned->attention.problem;
  const int64_t count = draw(2) == 0 ? 1 + draw(3) : 100;
  const int64_t input = draw(4), special = draw(6);
  for (int64_t n = 0; n < count && p.batch > 0; ++n) {
    const int64_t b = draw(p.batch), of = input < 3 ? input : draw(3);
    const Sequence s = SequenceOf(owned->attention, b);
    const int64_t rows = of == 0 ? s.q_len : s.k_len;
    if (rows == 0) continue;
    const int64_t h = draw(of == 0 ? p.heads_q : p.heads_kv), i = draw(rows);
    const int64_t d = draw(of == 2 ? p.dim_v : p.dim);
    void* const at = of == 0   ? owned->Q(b, h, i, d)
                     : of == 1 ? owned->K(b, h, i, d)
                               : owned->V(b, h, i, d);
    Set(owned->attention, at, kSpecials[special < 4 ? special : draw(4)]);
  }
}

}  // namespace attend::test
