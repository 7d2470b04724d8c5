// SPDX-License-Identifier: Apache-2.0
//
// K and V of one layer of a sequence as a session has them, kept by the load of sessions to verify
// answers. Not thread-safe.

#pragma once

#include <span>

#include "client/call/tensor.h"
#include "client/tool/call_spec.h"

namespace attend::client {

// [1, tokens, Hkv, D] and [1, tokens, Hkv, Dv]: tokens are consecutive in memory, so that those of
// an earlier time are a prefix, until KeepDraft or the rows appended after it overwrite them.
struct TokenHistory {
  TensorRef k, v;  // tokens so far; the memory has room for all

  // Has no tokens, and room for `capacity`.
  static Result<TokenHistory> Make(const CallSpec& spec, int64_t capacity);
  // The same tokens in other memory.
  Result<TokenHistory> Copy(const CallSpec& spec, int64_t capacity) const;
  void Append(const TensorRef& new_k, const TensorRef& new_v);
  // As Session::KeepDraft, of tokens that there are.
  void KeepDraft(int64_t length, std::span<const int64_t> kept);
};

}  // namespace attend::client
