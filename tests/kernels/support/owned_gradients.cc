// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/owned_gradients.h"

#include <algorithm>
#include <limits>
#include <random>

namespace attend::test {
namespace {

constexpr std::byte kGuard{0xa5};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

template <class Visit>
void OwnedGradients::ForEachRow(const Shape& shape, const TensorView& view, Visit visit) const {
  const Problem& p = a_.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a_, b);
    const int64_t first = shape.keys ? s.k_row : s.q_row;
    const int64_t length = shape.keys ? s.k_len : s.q_len;
    const int64_t dense = shape.keys ? p.len_k : p.len_q;
    const int64_t rows = shape.padding && !p.packed ? dense : length;
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t i = first; i < first + rows; ++i) {
        visit(b * view.stride_b + h * view.stride_h + i * view.stride_l);
      }
    }
  }
}

TensorView OwnedGradients::Make(const Shape& shape, DType dtype, const ConstTensorView& like) {
  TensorView view{nullptr, like.stride_b, like.stride_h, like.stride_l};
  int64_t elements = 1;
  Shape whole = shape;
  whole.padding = true;  // present, whatever its contents
  ForEachRow(whole, view, [&](int64_t at) { elements = std::max(elements, at + shape.dim); });
  const int64_t size = DTypeBytes(dtype);
  std::vector<std::byte>& block =
      blocks_.emplace_back(static_cast<size_t>(elements * size), kGuard);
  std::vector<bool>& writable = writable_.emplace_back(block.size(), false);
  view.data = block.data();
  ForEachRow(shape, view, [&](int64_t at) {
    for (int64_t d = 0; d < shape.dim; ++d) StoreElement(view.data, dtype, at + d, kNan);
    std::fill_n(writable.begin() + at * size, shape.dim * size, true);
  });
  return view;
}

OwnedGradients::OwnedGradients(const Attention& a, uint64_t seed) : a_(a) {
  const Problem& p = a.problem;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  blocks_.reserve(8);
  gradients_.d_q = Make({false, p.heads_q, p.dim}, p.dtype, a.q);
  gradients_.d_k = Make({true, p.heads_kv, p.dim}, p.dtype, a.k);
  gradients_.d_v = Make({true, p.heads_kv, p.dim_v}, p.dtype, a.v);
  // Every element NaN except those of rows within the lengths.
  const Shape o = {false, p.heads_q, p.dim_v, false};
  const TensorView d_o = Make(o, p.o_dtype(), {nullptr, a.o.stride_b, a.o.stride_h, a.o.stride_l});
  std::fill(blocks_.back().begin(), blocks_.back().end(), std::byte{0xff});
  writable_.back().assign(writable_.back().size(), true);
  ForEachRow(o, d_o, [&](int64_t at) {
    for (int64_t d = 0; d < p.dim_v; ++d)
      StoreElement(d_o.data, p.o_dtype(), at + d, normal(random));
  });
  gradients_.d_o = {d_o.data, d_o.stride_b, d_o.stride_h, d_o.stride_l};
  const TensorView d_lse = Make({false, p.heads_q, 1, false}, DType::kFloat32,
                                {nullptr, a.lse_stride_b, a.lse_stride_h, 1});
  writable_.back().assign(writable_.back().size(), true);
  ForEachRow({false, p.heads_q, 1, false}, d_lse,
             [&](int64_t at) { static_cast<float*>(d_lse.data)[at] = normal(random); });
  gradients_.d_lse = static_cast<const float*>(d_lse.data);
  if (p.has_bias && a.bias.dtype != DType::kBit) {
    const ConstTensorView like = {nullptr, a.bias.stride_b, a.bias.stride_h, a.bias.stride_q};
    // All Lq rows of Lk, whatever the lengths.
    TensorView& to = gradients_.d_bias;
    to = {nullptr, like.stride_b, like.stride_h, like.stride_l};
    const int64_t elements = std::max<int64_t>(0, p.batch - 1) * like.stride_b +
                             (p.heads_q - 1) * like.stride_h +
                             std::max<int64_t>(0, p.len_q - 1) * like.stride_l + p.len_k;
    std::vector<std::byte>& block = blocks_.emplace_back(static_cast<size_t>(elements) * 4 + 4);
    std::fill(block.begin(), block.end(), std::byte{0xff});
    writable_.emplace_back(block.size(), true);
    to.data = block.data();
  }
  if (p.has_sinks) {
    gradients_.d_sinks = static_cast<float*>(Make({}, DType::kFloat32, {}).data);
    std::vector<std::byte>& block = blocks_.back();
    block.assign(static_cast<size_t>(p.heads_q) * 4, std::byte{0xff});
    writable_.back().assign(block.size(), true);
    gradients_.d_sinks = reinterpret_cast<float*>(block.data());
  }
}

std::vector<std::byte> OwnedGradients::Bytes() const {
  std::vector<std::byte> all;
  for (const std::vector<std::byte>& block : blocks_) {
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

bool OwnedGradients::GuardsIntact() const {
  for (size_t n = 0; n < blocks_.size(); ++n) {
    for (size_t at = 0; at < blocks_[n].size(); ++at) {
      if (!writable_[n][at] && blocks_[n][at] != kGuard) return false;
    }
  }
  return true;
}

}  // namespace attend::test
