// SPDX-License-Identifier: Apache-2.0
//
// K and V of a session on a GPU, as far as the reference check reads them: of each KV head, the
// pages that the rows to be checked see, close together in one block of the server's memory budget.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"
#include "server/memory/host_pool.h"

namespace attend {

class FetchedKeys {
 public:
  // `attention`'s K and V are in pages of `arena`; its other arrays, and the page table, are on the
  // host. `pool`, of which it takes `tenant`'s memory, outlives what is returned. INVALID_ARGUMENT
  // names the bytes, if they are more than `bytes_max`; RESOURCE_EXHAUSTED: the pool has no room
  // for them now.
  static Result<FetchedKeys> Fetch(const Attention& attention, DeviceArena& arena,
                                   std::span<const RowId> rows, HostPool& pool, int tenant,
                                   int64_t bytes_max);

  // The same attention on the host, for those rows only.
  const Attention& attention() const { return attention_; }
  // Of the budget.
  int64_t bytes() const { return memory_.bytes(); }

 private:
  FetchedKeys() = default;

  Attention attention_;
  HostBlock memory_;
  std::vector<int32_t> pages_;
};

}  // namespace attend
