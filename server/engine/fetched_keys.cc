// SPDX-License-Identifier: Apache-2.0

#include "server/engine/fetched_keys.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/util/host_mapping.h"

namespace attend {
namespace {

// A KV head of a sequence.
struct HeadId {
  int64_t b = 0, h = 0;
  auto operator<=>(const HeadId&) const = default;
};

std::vector<HeadId> HeadsOf(const Problem& p, std::span<const RowId> rows) {
  std::vector<HeadId> heads;
  for (const RowId& row : rows) heads.push_back({row.b, row.h / p.group()});
  std::sort(heads.begin(), heads.end());
  heads.erase(std::unique(heads.begin(), heads.end()), heads.end());
  return heads;
}

int64_t PagesOf(const Attention& a, int64_t b) {
  return (SequenceOf(a, b).k_len + a.problem.page_rows - 1) / a.problem.page_rows;
}

}  // namespace

FetchedKeys::FetchedKeys(FetchedKeys&& other) noexcept
    : attention_(other.attention_),
      memory_(std::exchange(other.memory_, {})),
      pages_(std::move(other.pages_)) {}

FetchedKeys::~FetchedKeys() {
  if (memory_.data != nullptr) UnmapHostMemory(memory_.data, memory_.bytes);
}

Result<FetchedKeys> FetchedKeys::Fetch(const Attention& a, DeviceArena& arena,
                                       std::span<const RowId> rows, int64_t bytes_max) {
  const Problem& p = a.problem;
  const std::vector<HeadId> heads = HeadsOf(p, rows);
  FetchedKeys keys;
  Attention& host = keys.attention_;
  host = a;
  // Pages are numbered one after another, each sequence's from `first` on. One page of one head has
  // K, then V; those of head h are all before those of head h + 1.
  const int64_t page_elements = p.page_rows * (p.dim + p.dim_v);
  std::vector<int64_t> first(static_cast<size_t>(p.batch));
  int64_t count = 0, longest = 0;
  for (const HeadId& head : heads) {
    if (first[head.b] == 0) first[head.b] = std::exchange(count, count + PagesOf(a, head.b)) + 1;
    longest = std::max(longest, PagesOf(a, head.b));
  }
  int64_t bytes = 0;
  for (const HeadId& head : heads) {
    bytes += PagesOf(a, head.b) * page_elements * DTypeBytes(p.dtype);
  }
  if (bytes > bytes_max) {
    return InvalidArgument("check: the keys that the checked rows see take " +
                           std::to_string(bytes) + " bytes, a check may copy at most " +
                           std::to_string(bytes_max));
  }
  host.k.stride_b = host.v.stride_b = page_elements;
  host.k.stride_h = host.v.stride_h = count * page_elements;
  host.k.stride_l = p.dim;
  host.v.stride_l = p.dim_v;
  const int64_t mapped = p.heads_kv * host.k.stride_h * DTypeBytes(p.dtype);
  const Result<void*> memory = MapHostMemory(mapped);
  if (!memory.ok()) return memory.status();
  keys.memory_ = {*memory, mapped};
  char* const base = static_cast<char*>(*memory);
  host.k.data = base;
  host.v.data = base + p.page_rows * p.dim * DTypeBytes(p.dtype);
  host.kv_pages.stride = longest;
  keys.pages_.resize(static_cast<size_t>(p.batch * longest));
  host.kv_pages.pages = keys.pages_.data();
  std::vector<HostPiece> pieces;
  for (const HeadId& head : heads) {
    const Sequence s = SequenceOf(a, head.b);
    for (int64_t n = 0; n < PagesOf(a, head.b); ++n) {
      keys.pages_[head.b * longest + n] = static_cast<int32_t>(first[head.b] - 1 + n);
    }
    const auto add = [&](const ConstTensorView& from, const ConstTensorView& to, int64_t dim) {
      for (int64_t j = 0, run = 0; j < s.k_len; j += run) {
        run = from.stride_l == dim ? EvenKeys(p, j, s.k_len - j) : 1;
        const int64_t size = DTypeBytes(p.dtype);
        const auto* const source = static_cast<const char*>(from.data);
        auto* const place = static_cast<char*>(const_cast<void*>(to.data));
        pieces.push_back({source + KeyElement(a, from, s, head.b, head.h, j) * size,
                          place + KeyElement(host, to, s, head.b, head.h, j) * size,
                          run * dim * size});
      }
    };
    add(a.k, host.k, p.dim);
    add(a.v, host.v, p.dim_v);
  }
  ATTEND_RETURN_IF_ERROR(arena.Copy(pieces));
  return keys;
}

}  // namespace attend
