// SPDX-License-Identifier: Apache-2.0

#include "server/request/tensor_extents.h"

namespace attend {
namespace {

// The extent of a [batch, heads, rows, columns] view, in elements.
int64_t Elements(int64_t batch, int64_t stride_b, int64_t heads, int64_t stride_h, int64_t rows,
                 int64_t stride_l, int64_t columns) {
  if (batch == 0 || heads == 0 || rows == 0) return 0;
  return (batch - 1) * stride_b + (heads - 1) * stride_h + (rows - 1) * stride_l + columns;
}

// Rows of a tensor: packed ones form one sequence.
struct Rows {
  int64_t batch = 0;
  int64_t q = 0;
  int64_t k = 0;

  explicit Rows(const Problem& p)
      : batch(p.packed ? 1 : p.batch),
        q(p.packed ? p.total_q : p.len_q),
        k(p.packed ? p.total_k : p.len_k) {}
};

template <typename View>
Extent ExtentOf(const View& t, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
                DType dtype) {
  return {t.data, Elements(batch, t.stride_b, heads, t.stride_h, rows, t.stride_l, dim) *
                      DTypeBytes(dtype)};
}

}  // namespace

std::array<Extent, kTensorsMax> InputExtents(const Attention& a) {
  const Problem& p = a.problem;
  const Rows rows(p);
  std::array<Extent, kTensorsMax> extents = {
      ExtentOf(a.q, rows.batch, p.heads_q, rows.q, p.dim, p.dtype),
      ExtentOf(a.k, rows.batch, p.heads_kv, rows.k, p.dim, p.dtype),
      ExtentOf(a.v, rows.batch, p.heads_kv, rows.k, p.dim_v, p.dtype)};
  if (p.has_bias) {
    extents[3] = {a.bias.data, RowBytes(a.bias.dtype, Elements(p.batch, a.bias.stride_b, p.heads_q,
                                                               a.bias.stride_h, p.len_q,
                                                               a.bias.stride_q, p.len_k))};
  }
  return extents;
}

std::array<Extent, 2> OutputExtents(const Attention& a) {
  const Problem& p = a.problem;
  const Rows rows(p);
  std::array<Extent, 2> extents = {
      ExtentOf(a.o, rows.batch, p.heads_q, rows.q, p.dim_v, p.o_dtype())};
  if (p.return_lse) {
    const int64_t stride_b = p.packed ? 0 : a.lse_stride_b;
    extents[1] = {a.lse, Elements(rows.batch, stride_b, p.heads_q, a.lse_stride_h, rows.q, 1, 1) *
                             static_cast<int64_t>(sizeof(float))};
  }
  return extents;
}

}  // namespace attend
