// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/part_copies.h"

#include <algorithm>
#include <utility>

namespace attend::cuda {
namespace {

constexpr int64_t kBoxesMax = 4096;  // of one tensor; a call each

// Rows of the sequences of an attention, which for packed ones lie anywhere in the tensor.
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

// Index 0 is the rows.
constexpr int kRows = 0;

template <class View>
Extents ExtentsOf(const View& view, const Problem& p, int64_t heads, int64_t rows) {
  const int64_t size = DTypeBytes(p.dtype);
  return {Extent{rows, view.stride_l * size}, Extent{heads, view.stride_h * size},
          Extent{p.packed ? 1 : p.batch, view.stride_b * size}};
}

Extents BiasExtents(const Attention& a) {
  const Problem& p = a.problem;
  const int64_t size = DTypeBytes(a.bias.dtype);
  return {Extent{p.len_q, a.bias.stride_q * size}, Extent{p.heads_q, a.bias.stride_h * size},
          Extent{p.batch, a.bias.stride_b * size}};
}

// LSE's rows are contiguous: a run is all of a head's.
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
                               {host.kv_offsets, device.kv_offsets, offsets}};
  std::erase_if(arrays, [](const Array& array) { return array.host == nullptr; });
  return arrays;
}

bool LiesInside(const SpanList& spans, const void* data, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return std::any_of(spans.begin(), spans.end(), [&](const HostSpan& span) {
    const auto begin = reinterpret_cast<uintptr_t>(span.data);
    if (address < begin) return false;
    const auto offset = static_cast<int64_t>(address - begin);
    return offset <= span.bytes && bytes <= span.bytes - offset;
  });
}

bool IsMovable(const SpanList& spans, const void* data, int64_t run, const Extents& extents) {
  const int64_t boxes = CountBoxes(run, extents);
  if (boxes < 0 || boxes > kBoxesMax) return false;
  return boxes == 0 || LiesInside(spans, data, SpannedBytes(run, extents));
}

bool OffsetsLieInside(const int64_t* offsets, int64_t batch, int64_t total) {
  return offsets != nullptr && offsets[0] >= 0 && offsets[batch] <= total &&
         std::is_sorted(offsets, offsets + batch + 1);
}

void Append(const void* host, const void* device, int64_t run, const Extents& extents,
            bool to_device, std::vector<BoxCopy>* copies) {
  std::vector<ByteBox> boxes;
  if (!AppendBoxes(run, extents, &boxes)) return;  // CanMoveInParts says that it does not
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
  bool movable =
      IsMovable(item.inputs, a.q.data, p.dim * size, ExtentsOf(a.q, p, p.heads_q, rows_q)) &&
      IsMovable(item.inputs, a.k.data, p.dim * size, ExtentsOf(a.k, p, p.heads_kv, rows_k)) &&
      IsMovable(item.inputs, a.v.data, p.dim_v * size, ExtentsOf(a.v, p, p.heads_kv, rows_k)) &&
      IsMovable(item.outputs, a.o.data, p.dim_v * size, ExtentsOf(a.o, p, p.heads_q, rows_q));
  // Two rows of an output in one place would be no output.
  for (const Extent& extent : ExtentsOf(a.o, p, p.heads_q, rows_q)) {
    movable = movable && (extent.stride > 0 || extent.count <= 1);
  }
  if (p.return_lse) {
    movable = movable && IsMovable(item.outputs, a.lse, rows_q * 4, LseExtents(a));
  }
  if (p.has_bias) {
    movable = movable && IsMovable(item.inputs, a.bias.data, p.len_k * DTypeBytes(a.bias.dtype),
                                   BiasExtents(a));
  }
  for (const Array& array : ArraysOf(a, a)) {
    movable = movable && LiesInside(item.inputs, array.host, array.bytes);
  }
  return movable;
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
    const Extents extents = ExtentsOf(on_host, p, heads, range.end - range.begin);
    const int64_t first = range.begin * extents[kRows].stride;
    AddRows(tensor, Forward(on_host.data, first), Forward(on_device.data, first), dim * size,
            extents, range.end - range.begin, &copies);
  };
  add(kQ, host.q, device.q, p.heads_q, p.dim, QueryRows(host));
  add(kK, host.k, device.k, p.heads_kv, p.dim, KeyRows(host));
  add(kV, host.v, device.v, p.heads_kv, p.dim_v, KeyRows(host));
  if (p.has_bias) {
    // Whole rows: a part that sees fewer keys may be followed by one of the same rows.
    const Extents extents = BiasExtents(host);
    const int64_t rows = extents[kRows].stride == 0 ? 1 : p.len_q;
    AddRows(kBias, host.bias.data, device.bias.data,
            whole_.host.problem.len_k * DTypeBytes(host.bias.dtype), extents, rows, &copies);
  }
  return copies;
}

std::vector<BoxCopy> PartCopies::Out(const TwoViews& part) {
  const Attention& host = part.host;
  const Problem& p = host.problem;
  const RowRange range = QueryRows(host);
  const int64_t rows = range.end - range.begin;
  std::vector<BoxCopy> copies;
  const Extents extents = ExtentsOf(host.o, p, p.heads_q, rows);
  const int64_t first = range.begin * extents[kRows].stride;
  Append(Forward(host.o.data, first), Forward(part.device.o.data, first),
         p.dim_v * DTypeBytes(p.dtype), extents, false, &copies);
  if (p.return_lse) {
    Append(host.lse + range.begin, part.device.lse + range.begin,
           rows * static_cast<int64_t>(sizeof(float)), LseExtents(host), false, &copies);
  }
  return copies;
}

}  // namespace attend::cuda
