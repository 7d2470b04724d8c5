// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/arena_case.h"

#include <cstring>
#include <vector>

namespace attend::test {

ArenaCase::ArenaCase(Backend& backend, const OwnedAttention& owned, int64_t rows)
    : owned_(owned), attention_(owned.attention) {
  const Problem& p = attention_.problem;
  Result<std::unique_ptr<DeviceArena>> arena = backend.MakeArena(owned.input.bytes);
  status_ = arena.status();
  if (!arena.ok()) return;
  arena_ = std::move(*arena);
  const auto* const input = static_cast<const char*>(owned.input.data);
  std::vector<char> image(input, input + owned.input.bytes);
  const int64_t elements = p.batch * p.heads_kv * rows;
  const int64_t k_bytes = elements * p.dim * DTypeBytes(p.dtype);
  rows_ = {nullptr, k_bytes + elements * p.dim_v * DTypeBytes(p.dtype)};
  rows_block_ = MakeBlock(rows_.bytes);
  rows_.data = rows_block_.get();
  char* const to = reinterpret_cast<char*>(rows_block_.get());
  append_.rows = rows;
  append_.k = TakeRows(attention_.k, p.dim, to, image.data());
  append_.v = TakeRows(attention_.v, p.dim_v, to + k_bytes, image.data());
  const HostPiece whole = {image.data(), arena_->memory().data, owned.input.bytes};
  status_ = arena_->Copy({&whole, 1});
  const auto moved = [&](const void* data) {
    return static_cast<char*>(arena_->memory().data) + (static_cast<const char*>(data) - input);
  };
  attention_.k.data = moved(attention_.k.data);
  attention_.v.data = moved(attention_.v.data);
}

ConstTensorView ArenaCase::TakeRows(const ConstTensorView& view, int64_t dim, char* to,
                                    char* pages) const {
  const Attention& a = owned_.attention;
  const Problem& p = a.problem;
  const int64_t size = DTypeBytes(p.dtype), rows = append_.rows;
  const ConstTensorView taken = {to, p.heads_kv * rows * dim, rows * dim, dim};
  const int64_t begin =
      static_cast<const char*>(view.data) - static_cast<const char*>(owned_.input.data);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t n = 0; n < rows; ++n) {
        char* const row = pages + begin + KeyElement(a, view, s, b, h, s.k_len - rows + n) * size;
        std::memcpy(to + (b * taken.stride_b + h * taken.stride_h + n * dim) * size, row,
                    static_cast<size_t>(dim * size));
        std::memset(row, 0xff, static_cast<size_t>(dim * size));
      }
    }
  }
  return taken;
}

WorkItem ArenaCase::Item(const Selection& selection) const {
  WorkItem item{attention_, selection, {owned_.input, rows_}, {owned_.output}};
  item.in_place = {arena_->memory()};
  if (append_.rows > 0) item.append = append_;
  return item;
}

}  // namespace attend::test
