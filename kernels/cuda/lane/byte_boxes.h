// SPDX-License-Identifier: Apache-2.0
//
// Which bytes a strided tensor has, as few rectangles as can be: what a copy engine takes in one
// call. Pure arithmetic.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace attend::cuda {

// `rows` runs of `width` bytes, `pitch` bytes from one to the next.
struct ByteBox {
  int64_t offset = 0;
  int64_t width = 0;
  int64_t rows = 1;
  int64_t pitch = 0;  // 0 if there is one row
};

struct Extent {
  int64_t count = 0;
  int64_t stride = 0;  // bytes; 0: a broadcast dimension, whose elements are one
};
using Extents = std::array<Extent, 3>;  // in any order

// Copy engines take no more from row to row.
inline constexpr int64_t kPitchMax = INT32_MAX;

// Runs of `run` bytes at every index of `extents`. False, and nothing appended: strides are below 0
// or make runs overlap.
bool AppendBoxes(int64_t run, const Extents& extents, std::vector<ByteBox>* boxes);

// How many boxes that makes; -1 where AppendBoxes says false.
int64_t CountBoxes(int64_t run, const Extents& extents);

// From the first byte to behind the last; 0 if there is none. Strides must not be below 0.
int64_t SpannedBytes(int64_t run, const Extents& extents);

}  // namespace attend::cuda
