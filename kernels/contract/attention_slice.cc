// SPDX-License-Identifier: Apache-2.0
//
// A slice moves every pointer of the attention to the slice's first sequence, head or row and
// shrinks the shape; strides and memory stay the whole's. Everything that depends on a position
// moves along: dropout counts sequence, head and row in the whole (DropoutPlace), and row slices
// keep each row's distance to the diagonal.

#include "kernels/contract/attention_slice.h"

#include <algorithm>
#include <string>

namespace attend {
namespace {

Status CheckRange(const char* what, int64_t begin, int64_t end, int64_t size) {
  if (0 <= begin && begin < end && end <= size) return Status();
  return InvalidArgument(std::string(what) + " are [" + std::to_string(begin) + ", " +
                         std::to_string(end) + "), must be within [0, " + std::to_string(size) +
                         ")");
}

template <class T>
T* Advance(T* pointer, int64_t elements) {
  return pointer == nullptr ? nullptr : pointer + elements;
}

const void* Advance(const void* pointer, int64_t elements, DType dtype) {
  return Advance(static_cast<const char*>(pointer), RowBytes(dtype, elements));
}

void* Advance(void* pointer, int64_t elements, DType dtype) {
  return Advance(static_cast<char*>(pointer), RowBytes(dtype, elements));
}

void TakeSequencesAndHeads(const AttentionSlice& slice, Attention* a) {
  Problem& p = a->problem;
  const int64_t b = slice.batch_begin;
  const int64_t head_kv = slice.heads_begin;
  const int64_t head_q = head_kv * p.group();
  const auto move = [&](auto& view, DType dtype) {
    view.data = Advance(view.data, b * view.stride_b + head_q * view.stride_h, dtype);
  };
  move(a->q, p.dtype);
  move(a->o, p.o_dtype());
  for (ConstTensorView* view : {&a->k, &a->v}) {
    const int64_t sequence = p.page_rows > 0 ? 0 : b * view->stride_b;  // pages are shared
    view->data = Advance(view->data, sequence + head_kv * view->stride_h, p.dtype);
  }
  a->kv_pages.pages = Advance(a->kv_pages.pages, b * a->kv_pages.stride);
  a->lse = Advance(a->lse, b * a->lse_stride_b + head_q * a->lse_stride_h);
  a->bias.data =
      Advance(a->bias.data, b * a->bias.stride_b + head_q * a->bias.stride_h, a->bias.dtype);
  a->alibi_slopes = Advance(a->alibi_slopes, b * a->alibi_stride_b + head_q);
  a->sinks = Advance(a->sinks, head_q);
  a->dropout.sequence += b;
  a->dropout.head += head_q;
  a->q_lengths = Advance(a->q_lengths, b);
  a->kv_lengths = Advance(a->kv_lengths, b);
  a->q_offsets = Advance(a->q_offsets, b);
  a->kv_offsets = Advance(a->kv_offsets, b);
  const int64_t group = p.group();
  p.batch = slice.batch_end - slice.batch_begin;
  p.heads_kv = slice.heads_end - slice.heads_begin;
  p.heads_q = p.heads_kv * group;
}

// A row slice becomes a bottom-right problem of its own, with the keys up to the last row's
// diagonal: that keeps every row's distance to the diagonal, and no row of the slice sees a later
// key.
void TakeRows(const AttentionSlice& slice, Attention* a) {
  Problem& p = a->problem;
  const int64_t row = slice.rows_begin;
  a->q.data = Advance(a->q.data, row * a->q.stride_l, p.dtype);
  a->o.data = Advance(a->o.data, row * a->o.stride_l, p.o_dtype());
  a->lse = Advance(a->lse, row);
  a->dropout.row += row;
  a->bias.data = Advance(a->bias.data, row * a->bias.stride_q, a->bias.dtype);
  if (!p.mask.unrestricted()) {
    const int64_t offset =
        p.mask.alignment == Alignment::kBottomRight ? p.len_k - p.len_q : int64_t{0};
    p.len_k = std::max<int64_t>(0, slice.rows_end + offset);
    p.mask.alignment = Alignment::kBottomRight;
  }
  p.len_q = slice.rows_end - slice.rows_begin;
}

}  // namespace

bool RowsCanBeSliced(const Attention& a) {
  const Problem& p = a.problem;
  if (p.packed || a.q_lengths != nullptr || a.kv_lengths != nullptr) return false;
  if (p.key_offset != 0 || p.keys_after != 0) return false;
  if (p.mask.unrestricted()) return !p.has_alibi;
  if (p.mask.right != 0) return false;
  return p.mask.alignment == Alignment::kBottomRight || p.len_q <= p.len_k;
}

Result<Attention> TakeSlice(const Attention& attention, const AttentionSlice& slice) {
  const Problem& p = attention.problem;
  ATTEND_RETURN_IF_ERROR(CheckRange("sequences", slice.batch_begin, slice.batch_end, p.batch));
  ATTEND_RETURN_IF_ERROR(CheckRange("KV heads", slice.heads_begin, slice.heads_end, p.heads_kv));
  ATTEND_RETURN_IF_ERROR(CheckRange("query rows", slice.rows_begin, slice.rows_end, p.len_q));
  const bool all_rows = slice.rows_begin == 0 && slice.rows_end == p.len_q;
  if (!all_rows && !RowsCanBeSliced(attention)) {
    return InvalidArgument("query rows are [" + std::to_string(slice.rows_begin) + ", " +
                           std::to_string(slice.rows_end) + "), must be all " +
                           std::to_string(p.len_q) + " of " + Describe(p));
  }
  Attention part = attention;
  TakeSequencesAndHeads(slice, &part);
  if (!all_rows) TakeRows(slice, &part);
  return part;
}

}  // namespace attend
