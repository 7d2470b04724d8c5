// SPDX-License-Identifier: Apache-2.0

#include "server/util/byte_ranges.h"

#include <iterator>

namespace attend {

std::optional<ByteRange> ByteRanges::Add(const ByteRange& range) {
  auto next = end_of_.lower_bound(range.begin);
  auto previous = next == end_of_.begin() ? end_of_.end() : std::prev(next);
  if (previous != end_of_.end() && previous->second > range.begin) {
    return ByteRange{previous->first, previous->second};
  }
  if (next != end_of_.end() && next->first < range.end) return ByteRange{next->first, next->second};
  bytes_ += range.end - range.begin;
  int64_t end = range.end;
  if (next != end_of_.end() && next->first == end) {
    end = next->second;
    end_of_.erase(next);
  }
  if (previous != end_of_.end() && previous->second == range.begin) {
    previous->second = end;
  } else {
    end_of_.emplace(range.begin, end);
  }
  return std::nullopt;
}

}  // namespace attend
