// SPDX-License-Identifier: Apache-2.0
//
// The byte ranges of a tensor that are reserved for chunks: disjoint, and merged where they touch.
// Not thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace attend {

struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;  // greater than begin

  bool operator==(const ByteRange&) const = default;
};

class ByteRanges {
 public:
  // Adds `range` if it overlaps nothing; otherwise returns the first range that it overlaps.
  std::optional<ByteRange> Add(const ByteRange& range);

  int64_t bytes() const { return bytes_; }
  int64_t count() const { return static_cast<int64_t>(end_of_.size()); }

 private:
  std::map<int64_t, int64_t> end_of_;  // by begin
  int64_t bytes_ = 0;
};

}  // namespace attend
