// SPDX-License-Identifier: Apache-2.0
//
// K and V of a session on a GPU, as far as the reference check reads them: those KV heads that the
// rows to be checked see.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

class FetchedKeys {
 public:
  // `attention`'s K and V are in pages of `arena`; its other arrays, and the page table, are on the
  // host. RESOURCE_EXHAUSTED names the bytes, if they are more than `bytes_max` or there is no
  // memory for them.
  static Result<FetchedKeys> Fetch(const Attention& attention, DeviceArena& arena,
                                   std::span<const RowId> rows, int64_t bytes_max);
  FetchedKeys(FetchedKeys&& other) noexcept;
  FetchedKeys& operator=(FetchedKeys&&) = delete;
  ~FetchedKeys();

  // The same attention on the host, for those rows only.
  const Attention& attention() const { return attention_; }

 private:
  FetchedKeys() = default;

  Attention attention_;
  HostSpan memory_;  // of all KV heads; the system provides what is written
  std::vector<int32_t> pages_;
};

}  // namespace attend
