// SPDX-License-Identifier: Apache-2.0

#include "server/upload/upload_plan.h"

#include <utility>

#include "server/request/tensor_extents.h"

namespace attend {
namespace {

bool SameHeads(const AttentionSlice& a, const AttentionSlice& b) {
  return a.heads_begin == b.heads_begin && a.heads_end == b.heads_end;
}
bool SameBatch(const AttentionSlice& a, const AttentionSlice& b) {
  return a.batch_begin == b.batch_begin && a.batch_end == b.batch_end;
}

// Whether the two form one range of sequences and KV heads; if so, extends `slice` to it.
bool Join(const AttentionSlice& next, AttentionSlice* slice) {
  if (SameBatch(*slice, next) && SameHeads(*slice, next)) return true;
  if (SameBatch(*slice, next) && slice->heads_end == next.heads_begin) {
    slice->heads_end = next.heads_end;
    return true;
  }
  if (SameHeads(*slice, next) && slice->batch_end == next.batch_begin) {
    slice->batch_end = next.batch_end;
    return true;
  }
  return false;
}

AttentionSlice AllRows(const AttentionSlice& part, const Problem& whole) {
  AttentionSlice slice = part;
  slice.rows_begin = 0;
  slice.rows_end = whole.len_q;
  return slice;
}

// Groups adjacent parts of the same sequences and heads, whatever their rows are.
std::vector<UploadGroup> OneEach(const Problem& whole, std::span<const AttentionSlice> parts) {
  std::vector<UploadGroup> groups;
  for (const AttentionSlice& part : parts) {
    if (groups.empty() || !SameBatch(groups.back().slice, part) ||
        !SameHeads(groups.back().slice, part)) {
      groups.push_back({AllRows(part, whole), {}});
    }
    groups.back().parts.push_back(part);
  }
  return groups;
}

int64_t BytesOf(const Attention& a) {
  int64_t bytes = OutputExtents(a)[0].bytes;
  for (const Extent& tensor : InputExtents(a)) bytes += tensor.bytes;
  return bytes;
}

bool OutputsAreRuns(const Attention& a) {
  const Problem& p = a.problem;
  const auto [o, lse] = OutputExtents(a);
  return o.bytes == BytesO(p) && (!p.return_lse || lse.bytes == BytesLse(p));
}

void CountFromItsBeginning(UploadGroup* group) {
  for (AttentionSlice& part : group->parts) {
    part.batch_begin -= group->slice.batch_begin;
    part.batch_end -= group->slice.batch_begin;
    part.heads_begin -= group->slice.heads_begin;
    part.heads_end -= group->slice.heads_begin;
  }
}

}  // namespace

std::vector<UploadGroup> PlanUpload(const Attention& whole, std::span<const AttentionSlice> parts,
                                    int64_t bytes_min) {
  // Without keys there is nothing to compute, and no head has key bytes.
  if (whole.problem.packed || whole.problem.len_k == 0) return {};
  std::vector<UploadGroup> groups;
  int64_t bytes = bytes_min;  // of the last one
  bool runs = true;           // whether its outputs are
  for (UploadGroup& next : OneEach(whole.problem, parts)) {
    if ((bytes < bytes_min || !runs) && Join(next.slice, &groups.back().slice)) {
      auto& all = groups.back().parts;
      all.insert(all.end(), next.parts.begin(), next.parts.end());
    } else if (runs) {
      groups.push_back(std::move(next));
    } else {
      return {};
    }
    const Result<Attention> attention = TakeSlice(whole, groups.back().slice);
    if (!attention.ok()) return {};
    bytes = BytesOf(*attention);
    runs = OutputsAreRuns(*attention);
  }
  if (!runs || groups.size() < 2) return {};
  for (UploadGroup& group : groups) CountFromItsBeginning(&group);
  return groups;
}

}  // namespace attend
