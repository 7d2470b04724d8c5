// SPDX-License-Identifier: Apache-2.0
//
// Cuts a call by its keys: each part is a call over some of them and leaves out the q rows that see
// none. MergePartial merges the parts' answers. Pure.

#pragma once

#include <cstdint>
#include <string_view>

#include "client/call/attention_call.h"

namespace attend::client {

// The dimension of a tensor's rows in a dense layout.
inline size_t RowDimension(v1::Layout layout) { return layout == v1::LAYOUT_BLHD ? 1 : 2; }

// [begin, end) of the tensor along a dimension, with an owner: the tensor itself if that is all of
// it and it has an owner, else a copy. `name` is for errors. A range of bits must begin on a byte
// boundary.
Result<TensorRef> RangeOf(std::string_view name, const TensorRef& tensor, size_t dimension,
                          int64_t begin, int64_t end);

// Rows [begin, end) of q; empty if begin == end.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};
// The rows, out of `rows`, that see any of the keys [begin, end) out of `keys`.
RowRange RowsThatSee(const attend::Mask& mask, int64_t rows, int64_t keys, int64_t begin,
                     int64_t end);

// Keys [begin, end) of the whole. The part sends [send, end) of them, which must be among the
// call's k and v (the whole's last keys); [begin, send) are already where the part goes. send ==
// end: it sends none.
struct KeyPart {
  int64_t begin = 0;
  int64_t send = 0;
  int64_t end = 0;
};
// The part of a call on one sequence (B = 1, dense layout) of `keys` keys, for `rows` of q. It asks
// for float32 and LSE and has no sinks: MergePartial adds those.
Result<AttentionCall> PartOf(const AttentionCall& call, int64_t keys, const KeyPart& part,
                             const RowRange& rows);

}  // namespace attend::client
