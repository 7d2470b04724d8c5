// SPDX-License-Identifier: Apache-2.0
//
// A host copy of a session's K and V on a GPU, as far as a reference check reads them: for each KV
// head, the pages visible to the rows to be checked, packed into one block of the server's memory
// budget.

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
  // `attention`'s K and V are pages of `arena`; its other arrays and the page table are on the
  // host. Memory is taken from `pool` for `tenant`; the pool must outlive the result.
  // INVALID_ARGUMENT names the bytes if there are more than `bytes_max`; RESOURCE_EXHAUSTED: the
  // pool has no room now.
  static Result<FetchedKeys> Fetch(const Attention& attention, DeviceArena& arena,
                                   std::span<const RowId> rows, HostPool& pool, int tenant,
                                   int64_t bytes_max);

  // The same attention on the host. Valid for those rows only.
  const Attention& attention() const { return attention_; }
  // Bytes held of the budget.
  int64_t bytes() const { return memory_.bytes(); }

 private:
  FetchedKeys() = default;

  Attention attention_;
  HostBlock memory_;
  std::vector<int32_t> pages_;
};

}  // namespace attend
