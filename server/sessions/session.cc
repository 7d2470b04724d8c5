// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/session.h"

#include <algorithm>
#include <limits>

namespace attend {
namespace {

int64_t RoundUp(int64_t bytes) {
  return (bytes + kPageUnitBytes - 1) / kPageUnitBytes * kPageUnitBytes;
}

}  // namespace

std::string OutOfBounds(const std::string& field, int64_t value, int64_t low, int64_t high) {
  return field + " is " + std::to_string(value) + ", must be in [" + std::to_string(low) + ", " +
         std::to_string(high) + "]";
}

PageLayout LayoutOf(const LayerShape& shape, int64_t page_rows) {
  const int64_t row_bytes = shape.heads_kv * DTypeBytes(shape.dtype);
  const int64_t k_bytes = RoundUp(page_rows * row_bytes * shape.dim);
  const int64_t bytes = k_bytes + RoundUp(page_rows * row_bytes * shape.dim_v);
  return {page_rows, k_bytes, std::max(bytes, kPageBytesMin)};
}

int64_t FixedBytes(int64_t layers) {
  constexpr int64_t kNodes = 512;  // map nodes in the table, ids included
  constexpr int64_t kBranches = 2;
  const auto list = static_cast<int64_t>(sizeof(std::vector<PageNumber>));
  return static_cast<int64_t>(sizeof(Session)) + kNodes +
         kBranches * static_cast<int64_t>(sizeof(PageTree::Branch)) +
         layers * (static_cast<int64_t>(sizeof(Layer)) + kBranches * list);
}

int64_t Session::length() const {
  int64_t length = std::numeric_limits<int64_t>::max();
  for (const Layer& layer : layers) length = std::min(length, layer.length);
  return length;
}

int64_t Session::longest() const {
  int64_t longest = 0;
  for (const Layer& layer : layers) longest = std::max(longest, layer.length);
  return longest;
}

}  // namespace attend
