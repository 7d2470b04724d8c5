// SPDX-License-Identifier: Apache-2.0
//
// What a request is cut into, for several devices (split_plan.h) or while it arrives
// (upload_run.h).

#pragma once

#include <cstdint>

namespace attend {

// A range of an attention's output: half-open ranges of sequences, query heads and query rows. The
// heads are whole KV heads or within one.
struct QuerySlice {
  int shard = 0;  // that it belongs to, from 0; a shard may have several slices
  int64_t batch_begin = 0;
  int64_t batch_end = 0;
  int64_t heads_begin = 0;
  int64_t heads_end = 0;
  int64_t rows_begin = 0;
  int64_t rows_end = 0;

  bool operator==(const QuerySlice&) const = default;
};

}  // namespace attend
