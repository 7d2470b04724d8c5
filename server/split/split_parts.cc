// SPDX-License-Identifier: Apache-2.0

#include "server/split/split_parts.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "server/memory/range_allocator.h"
#include "server/request/tensor_extents.h"

namespace attend {
namespace {

int64_t Aligned(int64_t bytes) {
  return (bytes + kTensorAlignBytes - 1) / kTensorAlignBytes * kTensorAlignBytes;
}

// Byte ranges within a request's spans. Returns a limited number of spans that cover them:
// neighbours are merged across the smallest gaps, but never across two of the request's spans,
// because the bytes between those may be anything.
class Cover {
 public:
  explicit Cover(const SpanList& within) : within_(within) {}

  // At least the byte that `data` points to, so that an empty tensor has a place too.
  void Add(const void* data, int64_t bytes) {
    if (data == nullptr) return;
    const char* const begin = static_cast<const char*>(data);
    for (int n = 0; n < within_.size(); ++n) {
      const char* const first = static_cast<const char*>(within_[n].data);
      const char* const last = first + within_[n].bytes;
      if (begin < first || begin >= last) continue;
      const int64_t length = std::clamp<int64_t>(bytes, 1, last - begin);
      ranges_.push_back({n, begin - first, begin - first + length});
      return;
    }
  }

  SpanList Spans(int count_max) {
    std::sort(ranges_.begin(), ranges_.end());
    for (size_t n = 1; n < ranges_.size();) Gap(n) <= 0 ? Join(n) : static_cast<void>(++n);
    while (std::ssize(ranges_) > count_max) {
      size_t best = 0;
      for (size_t n = 1; n < ranges_.size(); ++n) {
        if (best == 0 || Gap(n) < Gap(best)) best = n;
      }
      Join(best);
    }
    SpanList spans;
    for (const Range& range : ranges_) {
      char* const first = static_cast<char*>(within_[range.span].data);
      spans.Add({first + range.begin, range.end - range.begin});
    }
    return spans;
  }

 private:
  struct Range {
    int span = 0;
    int64_t begin = 0;
    int64_t end = 0;

    auto operator<=>(const Range&) const = default;
  };
  int64_t Gap(size_t n) const {
    if (ranges_[n].span != ranges_[n - 1].span) return INT64_MAX;
    return ranges_[n].begin - ranges_[n - 1].end;
  }
  void Join(size_t n) {
    assert(ranges_[n].span == ranges_[n - 1].span);
    ranges_[n - 1].end = std::max(ranges_[n - 1].end, ranges_[n].end);
    ranges_.erase(ranges_.begin() + static_cast<std::ptrdiff_t>(n));
  }

  const SpanList& within_;
  std::vector<Range> ranges_;
};

void CoverTensors(const Attention& a, Cover* cover) {
  for (const Extent& tensor : InputExtents(a)) cover->Add(tensor.data, tensor.bytes);
}

void CoverArrays(const Attention& a, Cover* cover) {
  const Problem& p = a.problem;
  const auto add = [&](const auto* data, int64_t count) {
    cover->Add(data, count * static_cast<int64_t>(sizeof(*data)));
  };
  add(a.alibi_slopes, (p.batch - 1) * a.alibi_stride_b + p.heads_q);
  add(a.sinks, p.heads_q);
  add(a.q_lengths, p.batch);
  add(a.kv_lengths, p.batch);
}

// Moves a packed part's tensors to its first rows. Its offsets, which counted from the whole's
// first rows, are written to `to`, counted from the part's.
void MakeOwnRows(int64_t* to, Attention* a) {
  Problem& p = a->problem;
  const int64_t q_row = a->q_offsets[0];
  const int64_t k_row = a->kv_offsets[0];
  int64_t* const kv_to = to + p.batch + 1;
  for (int64_t b = 0; b <= p.batch; ++b) {
    to[b] = a->q_offsets[b] - q_row;
    kv_to[b] = a->kv_offsets[b] - k_row;
  }
  const auto move = [](auto& view, int64_t row, DType dtype) {
    view.data = const_cast<char*>(static_cast<const char*>(view.data)) +
                row * view.stride_l * DTypeBytes(dtype);
  };
  move(a->q, q_row, p.dtype);
  move(a->o, q_row, p.o_dtype());
  move(a->k, k_row, p.dtype);
  move(a->v, k_row, p.dtype);
  if (a->lse != nullptr) a->lse += q_row;
  a->q_offsets = to;
  a->kv_offsets = kv_to;
  p.total_q = to[p.batch];
  p.total_k = kv_to[p.batch];
}

// Whether the part's LSE is not contiguous in the whole's.
bool LseIsScattered(const Problem& part, const Problem& whole) {
  const bool some_rows = part.packed ? part.total_q != whole.total_q : part.len_q != whole.len_q;
  return part.return_lse && part.heads_q > 1 && some_rows;
}

Status Place(const Request& whole, HostPool& pool, Request* part) {
  Attention& a = part->attention;
  const Problem& p = a.problem;
  const int64_t offsets_bytes =
      p.packed ? 2 * (p.batch + 1) * static_cast<int64_t>(sizeof(int64_t)) : 0;
  if (p.packed) {
    Result<HostBlock> block = pool.Take(whole.tenant, Aligned(offsets_bytes));
    if (!block.ok()) return block.status();
    part->input = std::move(*block);
    MakeOwnRows(static_cast<int64_t*>(part->input.data()), &a);
  }
  Cover inputs(whole.input_spans);
  CoverTensors(a, &inputs);
  CoverArrays(a, &inputs);
  part->input_spans = inputs.Spans(p.packed ? SpanList::kMax - 1 : SpanList::kMax);
  if (p.packed) part->input_spans.Add({part->input.data(), part->input.bytes()});

  part->output_spans.Add({a.o.data, BytesO(p)});
  const int64_t lse_bytes = BytesLse(p);
  if (LseIsScattered(p, whole.attention.problem)) {
    Result<HostBlock> block = pool.Take(whole.tenant, lse_bytes);
    if (!block.ok()) return block.status();
    part->output = std::move(*block);
    const int64_t rows = p.packed ? p.total_q : p.len_q;
    a.lse = static_cast<float*>(part->output.data());
    a.lse_stride_h = rows;
    a.lse_stride_b = p.packed ? 0 : rows * p.heads_q;
  }
  part->output_spans.Add({a.lse, lse_bytes});
  return Status();
}

}  // namespace

Result<std::vector<std::unique_ptr<Request>>> MakeParts(const Request& whole,
                                                        std::span<const QuerySlice> slices,
                                                        HostPool& pool) {
  std::vector<std::unique_ptr<Request>> parts;
  for (const QuerySlice& slice : slices) {
    Result<Attention> attention = TakeQuerySlice(whole.attention, slice);
    if (!attention.ok()) return attention.status();
    auto part = std::make_unique<Request>();
    part->part = true;
    part->request_id = whole.request_id;
    part->layout = whole.layout;
    part->attention = *attention;
    part->kernel = whole.kernel;
    part->check = whole.check;
    part->lse_for_check = whole.lse_for_check;
    part->priority = whole.priority;
    part->tenant = whole.tenant;
    part->deadline = whole.deadline;
    part->transport = whole.transport;
    part->elements = whole.elements;
    part->received = whole.received;
    part->flops = Flops(part->attention);
    ATTEND_RETURN_IF_ERROR(Place(whole, pool, part.get()));
    parts.push_back(std::move(part));
  }
  return parts;
}

void GatherLse(const Request& part, const QuerySlice& slice, const Attention& whole) {
  const Problem& p = part.attention.problem;
  if (part.output.data() == nullptr) return;
  const int64_t rows = p.packed ? p.total_q : p.len_q;
  const int64_t row = p.packed ? whole.q_offsets[slice.batch_begin] : slice.rows_begin;
  for (int64_t b = 0; b < (p.packed ? 1 : p.batch); ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      const int64_t to_b = p.packed ? 0 : (slice.batch_begin + b) * whole.lse_stride_b;
      const float* const from =
          part.attention.lse + b * part.attention.lse_stride_b + h * part.attention.lse_stride_h;
      float* const to = whole.lse + to_b + (slice.heads_begin + h) * whole.lse_stride_h + row;
      std::memcpy(to, from, static_cast<size_t>(rows) * sizeof(float));
    }
  }
}

}  // namespace attend
