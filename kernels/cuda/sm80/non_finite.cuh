// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80, the rare case of NaN or Inf in values that a row must not see. Device code; a
// warp calls each function together, or the whole block where the comment says so.

#pragma once

#include <cstdint>

#include "kernels/cuda/sm80/softmax.cuh"

namespace attend::cuda::sm80 {

// Adds a key's contribution to a row of O, from its non-finite elements of V only; `output` is the
// row's first element. Returns whether one of the thread's elements is not NaN.
template <class T, class Element>
__device__ __forceinline__ bool AddNonFiniteKey(const char* values, int key, int columns,
                                                float weight, float* output) {
  const int column = ThreadIndex() % 4 * 2;
  float least = __int_as_float(0x7fffffff);
#pragma unroll 4
  for (int j = 0; j < T::kDim / 8; ++j, output += 4) {
    const auto pair =
        *reinterpret_cast<const uint32_t*>(values + T::Row::Offset(key, j) + 2 * column);
    const float2 v = Unpack<Element>(pair);
    if (NonFinite(v.x)) output[0] = fmaf(weight, v.x, output[0]);
    if (NonFinite(v.y)) output[1] = fmaf(weight, v.y, output[1]);
    if (8 * j + column < columns) least = fminf(least, output[0]);
    if (8 * j + column + 1 < columns) least = fminf(least, output[1]);
  }
  return !isnan(least);
}

// The tile's keys from `first` on that have a non-finite value, as a bit mask.
template <class T, class Element>
__device__ __forceinline__ uint32_t SpoiltKeys(const char* values, int first) {
  const int key = first + ThreadIndex() % 32;
  bool found = false;
#pragma unroll 2
  for (int n = 0; n < T::Row::kChunks && key < T::kKeys; ++n) {
    const uint4 v = *reinterpret_cast<const uint4*>(values + T::Row::Offset(key, n));
    found = found || AnyNonFinite<Element>(v);
  }
  return __ballot_sync(0xffffffffu, found);
}

// O += P V for the non-finite elements of V only, and rows that see their key. Slow: uses local
// memory, so that this rare code does not raise the kernel's register count. `columns`: of V.
template <class T, class Element>
__device__ __forceinline__ void AddNonFinite(const char* values, int columns, float to_log2,
                                             const Scores<T>& s, RowState<T>& state) {
  float scores[T::kSlices][T::kKeyBlocks][4];
  float output[T::kSlices][T::kDim / 8][4];
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks * 4; ++n) scores[m][n / 4][n % 4] = s[m][n / 4][n % 4];
#pragma unroll
    for (int j = 0; j < T::kDim / 2; ++j) output[m][j / 4][j % 4] = state.output[m][j / 4][j % 4];
  }
  // bit r: row r of the thread sees a key; it has an element that is not NaN
  uint32_t open = 0, seen = 0;
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    float least = __int_as_float(0x7fffffff);
#pragma unroll 1
    for (int j = 0; j < T::kDim / 8; ++j) {
      if (8 * j + KeyOfLane() < columns) least = fminf(least, output[r / 2][j][r % 2 * 2]);
      if (8 * j + KeyOfLane() + 1 < columns) least = fminf(least, output[r / 2][j][r % 2 * 2 + 1]);
    }
    float most = NegativeInfinity();
#pragma unroll 1
    for (int n = 0; n < T::kKeyBlocks; ++n) {
      const float* pair = &scores[r / 2][n][r % 2 * 2];
      most = fmaxf(most, fmaxf(pair[0], pair[1]));
    }
    if (!isnan(least)) open |= 1u << r;
    if (most != NegativeInfinity()) seen |= 1u << r;
  }
  seen |= __shfl_xor_sync(0xffffffffu, seen, 1);
  open &= seen | __shfl_xor_sync(0xffffffffu, seen, 2);
  uint32_t spoilt = 0;
#pragma unroll 1
  for (int key = 0; key < T::kKeys && __any_sync(0xffffffffu, open != 0); ++key) {
    if (key % 32 == 0) spoilt = SpoiltKeys<T, Element>(values, key);
    if ((spoilt >> key % 32 & 1) == 0) continue;
    const int owner = (ThreadIndex() & 28) + key % 8 / 2;
#pragma unroll
    for (int r = 0; r < T::kThreadRows; ++r) {
      const float own = scores[r / 2][key / 8][r % 2 * 2 + key % 2];
      const float score = __shfl_sync(0xffffffffu, own, owner);
      // A key whose score is -inf by arithmetic counts as hidden.
      if (score == NegativeInfinity() || (open >> r & 1) == 0) continue;
      const float weight =
          Unpack<Element>(Pack<Element>(Weight(score, to_log2, state.base[r]), 0.0f)).x;
      if (!AddNonFiniteKey<T, Element>(values, key, columns, weight,
                                       &output[r / 2][0][r % 2 * 2])) {
        open &= ~(1u << r);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
    for (int j = 0; j < T::kDim / 2; ++j) state.output[m][j / 4][j % 4] = output[m][j / 4][j % 4];
  }
}

// Where a tile of V that starts at `key` is recorded as having NaN or Inf. Adjacent tiles use
// different places, so that no warp overwrites one that others, one barrier behind, have yet to
// read.
template <class T>
__device__ __forceinline__ int& SpoiledKey(BlockWork& work, int key) {
  return work.spoiled[key / T::kKeys % 2];
}

// Records whether the chunks of a tile of V that this thread has copied have NaN or Inf.
template <class T, class Element>
__device__ __forceinline__ void NoteNonFinite(const char* values, int key, BlockWork& work) {
  using Row = typename T::Row;
  const int thread = ThreadIndex();
  values += Row::Offset(thread / Row::kSpan, thread % Row::kSpan);
  uint32_t found = 0;
#pragma unroll
  for (int pass = 0; pass < T::kKeys / T::kPassRows; ++pass) {
#pragma unroll
    for (int span = 0; span < T::kPassSpans; ++span) {
      const uint4 v = *reinterpret_cast<const uint4*>(values + pass * T::kPassRows * Row::kBytes +
                                                      span * Row::kSpan * 16);
      found |= NonFinitePair<Element>(v.x) | NonFinitePair<Element>(v.y) |
               NonFinitePair<Element>(v.z) | NonFinitePair<Element>(v.w);
    }
  }
  if (found != 0) SpoiledKey<T>(work, key) = key;
}

// For a tile of V with NaN or Inf, some row of which may not see a key; all threads of the block.
// Since 0 * NaN is NaN, `add` first adds the non-finite elements to the rows that see them; then
// they are zeroed, before the product.
template <class T, class Element, class Add>
__device__ __forceinline__ void TakeOutNonFinite(char* values, Add add) {
  add();
  __syncthreads();
#pragma unroll 1
  for (int n = ThreadIndex(); n < T::kTileBytes / 16; n += T::kThreads) {
    uint4& v = reinterpret_cast<uint4*>(values)[n];
    v = WithoutNonFinite<Element>(v);
  }
  __syncthreads();
}

}  // namespace attend::cuda::sm80
