// SPDX-License-Identifier: Apache-2.0
//
// Cuts a call by its keys: each part is a call over some of them, which leaves out the rows of q
// that see none of them. MergePartial makes one answer of the parts'. Pure.

#pragma once

#include <cstdint>
#include <string_view>

#include "client/call/attention_call.h"

namespace attend::client {

// Of a tensor's rows in a dense layout.
inline size_t RowDimension(v1::Layout layout) { return layout == v1::LAYOUT_BLHD ? 1 : 2; }

// [begin, end) of the tensor along a dimension, with an owner: the tensor itself if that is the
// whole and it has one, else a copy. `name` is for errors. A range of bits must begin on a byte.
Result<TensorRef> RangeOf(std::string_view name, const TensorRef& tensor, size_t dimension,
                          int64_t begin, int64_t end);

// Rows [begin, end) of q; none if begin == end.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};
// The rows, of `rows`, that see any of the keys [begin, end) of `keys`.
RowRange RowsThatSee(const attend::Mask& mask, int64_t rows, int64_t keys, int64_t begin,
                     int64_t end);

// Keys [begin, end) of a whole's. The call's k and v are the whole's last keys; those that the part
// sends are [send, end), and the others are where it goes. send == end: it sends none.
struct KeyPart {
  int64_t begin = 0;
  int64_t send = 0;
  int64_t end = 0;
};
// The part of a call on one sequence (B = 1, dense layout) whose whole has `keys` keys, for `rows`
// of q. It answers in float32 and with LSE, and has no sinks: they are MergePartial's.
Result<AttentionCall> PartOf(const AttentionCall& call, int64_t keys, const KeyPart& part,
                             const RowRange& rows);

}  // namespace attend::client
