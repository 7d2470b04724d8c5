// SPDX-License-Identifier: Apache-2.0
//
// Covers the bytes of a strided tensor with the fewest rectangles that a copy engine takes in one
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
  int64_t stride = 0;  // bytes; 0: a broadcast dimension, whose elements are all the same
};
using Extents = std::array<Extent, 3>;  // in any order

// The largest pitch that copy engines take.
inline constexpr int64_t kPitchMax = INT32_MAX;

// Appends runs of `run` bytes at every index of `extents`. False, with nothing appended, if strides
// are negative or make runs overlap.
bool AppendBoxes(int64_t run, const Extents& extents, std::vector<ByteBox>* boxes);

// How many boxes AppendBoxes would append; -1 if it would return false.
int64_t CountBoxes(int64_t run, const Extents& extents);

// Bytes from the first to the end of the last run; 0 if there is none. Strides must not be
// negative.
int64_t SpannedBytes(int64_t run, const Extents& extents);

}  // namespace attend::cuda
