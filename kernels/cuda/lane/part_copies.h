// SPDX-License-Identifier: Apache-2.0
//
// Which bytes each part of a cut attention (cut_plan.h) needs on the device before its kernel and
// on the host after it. Pure arithmetic, except that the offsets of packed sequences are read.

#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"
#include "kernels/cuda/lane/byte_boxes.h"
#include "kernels/cuda/lane/engine_copy.h"
#include "kernels/util/status.h"

namespace attend::cuda {

// Whether the item can be moved in parts: every tensor is inside one of its spans, no runs of a
// copied tensor overlap, it does not need too many copies, and packed offsets are inside the
// tensors.
bool CanMoveInParts(const WorkItem& item);

// Whether Q, K, V, bias and O are all in place, so that parts copy next to nothing in and nothing
// out.
bool TensorsAreInPlace(const WorkItem& item);

// The bytes of O and LSE that the kernel writes in place; none if they are moved. INVALID_ARGUMENT:
// they are not entirely in place, or their rows overlap.
Result<std::vector<ByteRuns>> OutputsInPlace(const WorkItem& item);

// One attention as the host and as the device has it.
struct TwoViews {
  Attention host;
  Attention device;
};
Result<TwoViews> TakeSlice(const TwoViews& whole, const AttentionSlice& slice);

// The copies of one attention for which CanMoveInParts is true. Request each part once, in
// execution order: bytes that an earlier part has copied are not copied again, and bytes in place,
// which both views share, are never copied.
class PartCopies {
 public:
  PartCopies(const TwoViews& whole, const SpanList& in_place)
      : whole_(whole), in_place_(in_place) {}

  // Slopes, sinks, lengths and offsets of the whole: a few KiB, copied before the first part.
  std::vector<BoxCopy> Arrays() const;
  // To the device: the part's rows of Q, K, V and bias.
  std::vector<BoxCopy> In(const TwoViews& part);
  // To the host: its rows of O and LSE.
  std::vector<BoxCopy> Out(const TwoViews& part) const;

 private:
  enum Tensor { kQ, kK, kV, kBias };

  // Adds the rows up to `rows` that are not yet copied, of the part of a tensor that starts at
  // `host`.
  void AddRows(Tensor tensor, const void* host, const void* device, int64_t run, Extents extents,
               int64_t rows, std::vector<BoxCopy>* copies);

  const TwoViews whole_;
  const SpanList in_place_;
  std::map<std::pair<Tensor, const void*>, int64_t> rows_done_;
};

}  // namespace attend::cuda
