// SPDX-License-Identifier: Apache-2.0
//
// Attentions whose pages are in a device's arena, for every backend.

#pragma once

#include <cstdint>
#include <memory>

#include "kernels/contract/backend.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

// K and V of `owned`, which are in pages, in an arena of `backend` instead: with the last `rows`
// keys of every sequence missing, which an item brings to be appended.
class ArenaCase {
 public:
  ArenaCase(Backend& backend, const OwnedAttention& owned, int64_t rows);

  // An error if the arena could not be made or filled.
  const Status& status() const { return status_; }
  // Reads the arena; appends, if `rows` was not 0.
  WorkItem Item(const Selection& selection) const;

 private:
  // The missing rows of K (of V) are taken from `view`, whose pages then hold NaN.
  ConstTensorView TakeRows(const ConstTensorView& view, int64_t dim, char* to, char* pages) const;

  const OwnedAttention& owned_;
  Status status_;
  std::unique_ptr<DeviceArena> arena_;
  Attention attention_;
  KeyAppend append_;
  Block rows_block_;
  HostSpan rows_;
};

}  // namespace attend::test
