// SPDX-License-Identifier: Apache-2.0
//
// Every tensor of a part becomes 2D boxes, the same on host and device, as both have the same
// strides. Parts of the same sequences and heads have ascending rows, so it suffices to remember,
// per tensor and head range, how many rows have been copied: each part copies only the rows that
// are new.

#include "kernels/cuda/lane/part_copies.h"

#include <algorithm>
#include <string>
#include <utility>

namespace attend::cuda {
namespace {

constexpr int64_t kBoxesMax = 4096;  // per tensor; one call per box

// Row range of an attention's sequences; packed ones may start anywhere in the tensor.
struct RowRange {
  int64_t begin;
  int64_t end;
};

RowRange QueryRows(const Attention& host) {
  const Problem& p = host.problem;
  if (!p.packed) return {0, p.len_q};
  return {host.q_offsets[0], host.q_offsets[p.batch]};
}

RowRange KeyRows(const Attention& host) {
  const Problem& p = host.problem;
  if (!p.packed) return {0, p.len_k};
  return {host.kv_offsets[0], host.kv_offsets[p.batch]};
}

// Index of the rows in Extents.
constexpr int kRows = 0;

template <class View>
Extents ExtentsOf(const View& view, DType dtype, const Problem& p, int64_t heads, int64_t rows) {
  const int64_t size = DTypeBytes(dtype);
  return {Extent{rows, view.stride_l * size}, Extent{heads, view.stride_h * size},
          Extent{p.packed ? 1 : p.batch, view.stride_b * size}};
}

Extents BiasExtents(const Attention& a) {
  const Problem& p = a.problem;
  const auto bytes = [&a](int64_t stride) { return RowBytes(a.bias.dtype, stride); };
  return {Extent{p.len_q, bytes(a.bias.stride_q)}, Extent{p.heads_q, bytes(a.bias.stride_h)},
          Extent{p.batch, bytes(a.bias.stride_b)}};
}

// LSE's rows are contiguous: one run per head.
Extents LseExtents(const Attention& a) {
  const Problem& p = a.problem;
  constexpr int64_t kSize = sizeof(float);
  return {Extent{1, 0}, Extent{p.heads_q, a.lse_stride_h * kSize},
          Extent{p.packed ? 1 : p.batch, a.lse_stride_b * kSize}};
}

struct Array {
  const void* host;
  const void* device;
  int64_t bytes;
};

// Bytes of the page table up to the sequences' last page; it may end there.
int64_t PageTableBytes(const Attention& host) {
  const Problem& p = host.problem;
  int64_t entries = 0;
  for (int64_t b = 0; b < p.batch && p.page_rows > 0; ++b) {
    const int64_t pages = (SequenceOf(host, b).k_len + p.page_rows - 1) / p.page_rows;
    if (pages > 0) entries = std::max(entries, b * host.kv_pages.stride + pages);
  }
  return entries * static_cast<int64_t>(sizeof(int32_t));
}

std::vector<Array> ArraysOf(const Attention& host, const Attention& device) {
  const Problem& p = host.problem;
  constexpr int64_t kFloat = sizeof(float), kLength = sizeof(int64_t);
  const int64_t slopes = host.alibi_stride_b * (p.batch - 1) + p.heads_q;
  const int64_t lengths = p.batch * kLength, offsets = lengths + kLength;
  std::vector<Array> arrays = {{host.alibi_slopes, device.alibi_slopes, slopes * kFloat},
                               {host.sinks, device.sinks, p.heads_q * kFloat},
                               {host.q_lengths, device.q_lengths, lengths},
                               {host.kv_lengths, device.kv_lengths, lengths},
                               {host.q_offsets, device.q_offsets, offsets},
                               {host.kv_offsets, device.kv_offsets, offsets},
                               {host.kv_pages.pages, device.kv_pages.pages, PageTableBytes(host)}};
  std::erase_if(arrays, [](const Array& array) { return array.host == nullptr; });
  return arrays;
}

bool IsInPlace(const SpanList& in_place, const void* data) { return in_place.Contains(data, 1); }

// A tensor that is not copied may have any strides that stay inside its memory.
bool LiesInPlace(const SpanList& in_place, const void* data, int64_t run, const Extents& extents) {
  for (const Extent& extent : extents) {
    if (extent.stride < 0 && extent.count > 1) return false;
  }
  return in_place.Contains(data, SpannedBytes(run, extents));
}

bool IsMovable(const SpanList& spans, const SpanList& in_place, const void* data, int64_t run,
               const Extents& extents) {
  if (IsInPlace(in_place, data)) return LiesInPlace(in_place, data, run, extents);
  const int64_t boxes = CountBoxes(run, extents);
  if (boxes < 0 || boxes > kBoxesMax) return false;
  return boxes == 0 || spans.Contains(data, SpannedBytes(run, extents));
}

bool OffsetsLieInside(const int64_t* offsets, int64_t batch, int64_t total) {
  return offsets != nullptr && offsets[0] >= 0 && offsets[batch] <= total &&
         std::is_sorted(offsets, offsets + batch + 1);
}

void Append(const void* host, const void* device, int64_t run, const Extents& extents,
            bool to_device, std::vector<BoxCopy>* copies) {
  std::vector<ByteBox> boxes;
  if (!AppendBoxes(run, extents, &boxes)) return;  // CanMoveInParts has checked this
  for (const ByteBox& box : boxes) {
    char* const on_host = static_cast<char*>(const_cast<void*>(host)) + box.offset;
    char* const on_device = static_cast<char*>(const_cast<void*>(device)) + box.offset;
    copies->push_back({to_device ? on_device : on_host, to_device ? on_host : on_device, box.width,
                       box.rows, box.pitch});
  }
}

const void* Forward(const void* data, int64_t bytes) {
  return static_cast<const char*>(data) + bytes;
}

}  // namespace

bool CanMoveInParts(const WorkItem& item) {
  const Attention& a = item.attention;
  const Problem& p = a.problem;
  if (p.packed && !(OffsetsLieInside(a.q_offsets, p.batch, p.total_q) &&
                    OffsetsLieInside(a.kv_offsets, p.batch, p.total_k))) {
    return false;
  }
  const int64_t size = DTypeBytes(p.dtype);
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  const auto input = [&](const void* data, int64_t run, const Extents& extents) {
    return IsMovable(item.inputs, item.in_place, data, run, extents);
  };
  // Pages are never copied: a part would have to know which ones it needs.
  const auto keys = [&](const ConstTensorView& view, int64_t run) {
    if (p.page_rows > 0) return IsInPlace(item.in_place, view.data);
    return input(view.data, run, ExtentsOf(view, p.dtype, p, p.heads_kv, rows_k));
  };
  const auto output = [&](const void* data, int64_t run, const Extents& extents) {
    return IsMovable(item.outputs, item.in_place, data, run, extents);
  };
  const Extents o_extents = ExtentsOf(a.o, p.o_dtype(), p, p.heads_q, rows_q);
  bool movable = input(a.q.data, p.dim * size, ExtentsOf(a.q, p.dtype, p, p.heads_q, rows_q)) &&
                 keys(a.k, p.dim * size) && keys(a.v, p.dim_v * size) &&
                 output(a.o.data, p.dim_v * DTypeBytes(p.o_dtype()), o_extents);
  // Two rows of an output must not overlap.
  for (const Extent& extent : o_extents) {
    movable = movable && (extent.stride > 0 || extent.count <= 1);
  }
  if (p.return_lse) {
    movable = movable && output(a.lse, rows_q * 4, LseExtents(a));
  }
  if (p.has_bias) {
    movable = movable && input(a.bias.data, RowBytes(a.bias.dtype, p.len_k), BiasExtents(a));
  }
  for (const Array& array : ArraysOf(a, a)) {
    movable = movable && (item.inputs.Contains(array.host, array.bytes) ||
                          item.in_place.Contains(array.host, array.bytes));
  }
  return movable;
}

bool TensorsAreInPlace(const WorkItem& item) {
  const Attention& a = item.attention;
  const auto in_place = [&item](const void* data) { return IsInPlace(item.in_place, data); };
  return in_place(a.q.data) && in_place(a.k.data) && in_place(a.v.data) && in_place(a.o.data) &&
         (!a.problem.has_bias || in_place(a.bias.data));
}

Result<std::vector<ByteRuns>> OutputsInPlace(const WorkItem& item) {
  const Attention& a = item.attention;
  const Problem& p = a.problem;
  std::vector<ByteRuns> runs;
  const auto add = [&](const char* name, void* data, int64_t run, const Extents& extents,
                       int64_t first) {
    if (!IsInPlace(item.in_place, data)) return Status();
    char* const begin = static_cast<char*>(data) + first;
    if (!LiesInPlace(item.in_place, begin, run, extents)) {
      return InvalidArgument(std::string(name) + " is not all inside a span in place");
    }
    std::vector<ByteBox> boxes;
    if (!AppendBoxes(run, extents, &boxes)) {
      return InvalidArgument(std::string(name) + " has rows that overlap");
    }
    for (const ByteBox& box : boxes) {
      runs.push_back({begin + box.offset, box.width, box.rows, box.pitch});
    }
    return Status();
  };
  if (p.packed && !OffsetsLieInside(a.q_offsets, p.batch, p.total_q)) {
    return InvalidArgument("q_offsets do not ascend within the " + std::to_string(p.total_q) +
                           " rows of q");
  }
  const RowRange range = QueryRows(a);
  const int64_t rows = range.end - range.begin;
  const Extents extents = ExtentsOf(a.o, p.o_dtype(), p, p.heads_q, rows);
  ATTEND_RETURN_IF_ERROR(add("o", a.o.data, p.dim_v * DTypeBytes(p.o_dtype()), extents,
                             range.begin * extents[kRows].stride));
  if (p.return_lse) {
    constexpr int64_t kSize = sizeof(float);
    ATTEND_RETURN_IF_ERROR(add("lse", a.lse, rows * kSize, LseExtents(a), range.begin * kSize));
  }
  return runs;
}

Result<TwoViews> TakeSlice(const TwoViews& whole, const AttentionSlice& slice) {
  Result<Attention> host = attend::TakeSlice(whole.host, slice);
  if (!host.ok()) return host.status();
  Result<Attention> device = attend::TakeSlice(whole.device, slice);
  if (!device.ok()) return device.status();
  return TwoViews{*std::move(host), *std::move(device)};
}

std::vector<BoxCopy> PartCopies::Arrays() const {
  std::vector<BoxCopy> copies;
  for (const Array& array : ArraysOf(whole_.host, whole_.device)) {
    if (IsInPlace(in_place_, array.host)) continue;
    Append(array.host, array.device, array.bytes, {Extent{1, 0}, Extent{1, 0}, Extent{1, 0}}, true,
           &copies);
  }
  return copies;
}

void PartCopies::AddRows(Tensor tensor, const void* host, const void* device, int64_t run,
                         Extents extents, int64_t rows, std::vector<BoxCopy>* copies) {
  int64_t& done = rows_done_[{tensor, host}];
  if (rows <= done) return;
  const int64_t skipped = done * extents[kRows].stride;
  extents[kRows].count = rows - done;
  done = rows;
  Append(Forward(host, skipped), Forward(device, skipped), run, extents, true, copies);
}

std::vector<BoxCopy> PartCopies::In(const TwoViews& part) {
  const Attention& host = part.host;
  const Attention& device = part.device;
  const Problem& p = host.problem;
  const int64_t size = DTypeBytes(p.dtype);
  std::vector<BoxCopy> copies;
  const auto add = [&](Tensor tensor, const ConstTensorView& on_host,
                       const ConstTensorView& on_device, int64_t heads, int64_t dim,
                       const RowRange& range) {
    if (IsInPlace(in_place_, on_host.data)) return;
    const Extents extents = ExtentsOf(on_host, p.dtype, p, heads, range.end - range.begin);
    const int64_t first = range.begin * extents[kRows].stride;
    AddRows(tensor, Forward(on_host.data, first), Forward(on_device.data, first), dim * size,
            extents, range.end - range.begin, &copies);
  };
  add(kQ, host.q, device.q, p.heads_q, p.dim, QueryRows(host));
  add(kK, host.k, device.k, p.heads_kv, p.dim, KeyRows(host));
  add(kV, host.v, device.v, p.heads_kv, p.dim_v, KeyRows(host));
  if (p.has_bias && !IsInPlace(in_place_, host.bias.data)) {
    // Copy whole rows: a later part of the same rows may see more keys.
    const Extents extents = BiasExtents(host);
    const int64_t rows = extents[kRows].stride == 0 ? 1 : p.len_q;
    AddRows(kBias, host.bias.data, device.bias.data,
            RowBytes(host.bias.dtype, whole_.host.problem.len_k), extents, rows, &copies);
  }
  return copies;
}

std::vector<BoxCopy> PartCopies::Out(const TwoViews& part) const {
  const Attention& host = part.host;
  const Problem& p = host.problem;
  const RowRange range = QueryRows(host);
  const int64_t rows = range.end - range.begin;
  std::vector<BoxCopy> copies;
  if (!IsInPlace(in_place_, host.o.data)) {
    const Extents extents = ExtentsOf(host.o, p.o_dtype(), p, p.heads_q, rows);
    const int64_t first = range.begin * extents[kRows].stride;
    Append(Forward(host.o.data, first), Forward(part.device.o.data, first),
           p.dim_v * DTypeBytes(p.o_dtype()), extents, false, &copies);
  }
  if (p.return_lse && !IsInPlace(in_place_, host.lse)) {
    Append(host.lse + range.begin, part.device.lse + range.begin,
           rows * static_cast<int64_t>(sizeof(float)), LseExtents(host), false, &copies);
  }
  return copies;
}

}  // namespace attend::cuda
