// SPDX-License-Identifier: Apache-2.0

#include "client/load/token_history.h"

#include <cstring>
#include <tuple>
#include <utility>

namespace attend::client {
namespace {

std::byte* MemoryOf(const TensorRef& tensor) {
  return static_cast<std::byte*>(const_cast<void*>(tensor.data));
}

}  // namespace

Result<TokenHistory> TokenHistory::Make(const CallSpec& spec, int64_t capacity) {
  TokenHistory history;
  for (const auto& [name, dim, to] :
       {std::tuple{"k", spec.dim, &history.k}, std::tuple{"v", spec.dim_v, &history.v}}) {
    const auto made = HostTensor::Make(name, spec.dtype, {1, capacity, spec.heads_kv, dim});
    if (!made.ok()) return made.status();
    *to = *made;
    to->shape[1] = to->bytes = 0;
  }
  return history;
}

Result<TokenHistory> TokenHistory::Copy(const CallSpec& spec, int64_t capacity) const {
  Result<TokenHistory> copy = Make(spec, capacity);
  if (copy.ok()) copy->Append(k, v);
  return copy;
}

void TokenHistory::Append(const TensorRef& new_k, const TensorRef& new_v) {
  for (const auto& [rows, to] : {std::pair{&new_k, &k}, std::pair{&new_v, &v}}) {
    if (rows->bytes > 0) {
      std::memcpy(MemoryOf(*to) + to->bytes, rows->data, static_cast<size_t>(rows->bytes));
    }
    to->bytes += rows->bytes;
    to->shape[1] += rows->shape[1];
  }
}

void TokenHistory::KeepDraft(int64_t length, std::span<const int64_t> kept) {
  for (TensorRef* const tensor : {&k, &v}) {
    if (tensor->shape[1] == 0) continue;
    const int64_t row = tensor->bytes / tensor->shape[1];
    int64_t tokens = length;
    for (const int64_t token : kept) {
      std::memmove(MemoryOf(*tensor) + tokens * row, MemoryOf(*tensor) + (length + token) * row,
                   static_cast<size_t>(row));
      ++tokens;
    }
    tensor->shape[1] = tokens;
    tensor->bytes = tokens * row;
  }
}

}  // namespace attend::client
