// SPDX-License-Identifier: Apache-2.0
//
// Cuts a KV head of the backward pass into slabs of keys and bands of rows.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/cpu/flash_gradients_tile.h"

namespace attend::cpu_flash {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One KV head of one sequence: how it is cut, which depends on the problem alone, and the offsets
// of its sums.
struct KeyHead {
  int64_t b = 0;
  int64_t h_kv = 0;
  Sequence sequence;
  int64_t slabs = 0;  // 0 if there is no key
  // A band is at most this many heads, and this many rows of each.
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t row_bands = 0;
  int64_t bands = 0;  // at least one, possibly without rows
  int64_t part = 0;   // floats of one slab's part of dQ
  int64_t d_q = 0, d_k = 0, d_v = 0;
  int64_t states = 0;

  int64_t band_rows() const { return PaddedRows(heads * rows); }

  int64_t lanes() const { return PaddedKeys(sequence.k_len); }
  // Slab n: whole key tiles, divided evenly.
  KeyRange Slab(int64_t n) const {
    const int64_t tiles = CeilDiv(sequence.k_len, kGradientKeys);
    const int64_t count = std::max<int64_t>(1, slabs);
    return {n * tiles / count * kGradientKeys,
            std::min(sequence.k_len, (n + 1) * tiles / count * kGradientKeys)};
  }
};

KeyHead MakeKeyHead(const Attention& a, int64_t b, int64_t h_kv);

// The task of all rows and keys of a KV head.
GradientTask WholeHead(const Attention& a, const Gradients& g, int64_t b, int64_t h_kv);

// Pairs of rows and keys, counted in whole tiles of rows.
double WorkOf(const GradientTask& task);

// The calling thread's scratch, allocated on first use and kept.
GradientScratch* ThreadScratch();

}  // namespace attend::cpu_flash
