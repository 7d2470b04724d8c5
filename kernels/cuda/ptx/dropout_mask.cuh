// SPDX-License-Identifier: Apache-2.0
//
// Dropout (contract/dropout.h) in the kernels: one weight at a time, or a thread's weights of 16
// rows by 16 keys after Tensor Core products, which one call of Philox serves. Device code; any
// thread.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"

namespace attend::cuda {

// Whether the weight of sequence b, query head h, row i and key j is kept. As DropoutKeeps, without
// a dynamic index into `words`, which would put them into local memory.
__device__ __forceinline__ bool KeepsWeight(const Attention& a, int64_t b, int64_t h, int64_t i,
                                            int64_t j) {
  i += a.dropout.row;
  j += a.problem.key_offset;
  const uint32_t(&words)[4] =
      DropoutGroup(a.dropout.seed, a.dropout.sequence + b, a.dropout.head + h, i, j).words;
  const uint32_t even = i / 8 % 2 == 0 ? words[0] : words[2];
  const uint32_t odd = i / 8 % 2 == 0 ? words[1] : words[3];
  const uint32_t word = j / 8 % 2 == 0 ? even : odd;
  const uint32_t draw = j % 2 == 0 ? word & 0xffffu : word >> 16;
  return static_cast<int32_t>(draw) >= a.problem.dropout;
}

// 0xffff in each kept half of `draws`. `kept` is 65536 - dropout in both halves: a half is kept if
// its sum with `kept` carries.
__device__ __forceinline__ uint32_t KeptHalves(uint32_t draws, uint32_t kept) {
  const uint32_t sum = (draws & 0x7fff7fffu) + (kept & 0x7fff7fffu);
  const uint32_t carries = (draws & kept) | ((draws | kept) & sum);
  uint32_t mask;  // spread each half's highest bit
  asm("prmt.b32 %0, %1, %1, 0xbb99;" : "=r"(mask) : "r"(carries));
  return mask;
}

// Dropout for a thread that has rows r and r + 8 and keys c, c + 1, c + 8 and c + 9 of each 16 x 16
// block, with r = lane / 4 and c = lane % 4 * 2. The part's keys must begin at a multiple of 16 of
// the whole's.
struct DropoutLane {
  uint64_t seed;
  uint32_t head, sequence;
  uint32_t first_row, first_key;  // DropoutGroup's counters for r and c in the first block
  uint32_t kept;                  // see KeptHalves
  uint32_t least;  // a weight is kept if its draw, in the upper half of 32 bits, is at least this
  bool apart;      // r and r + 8 belong to different groups

  // `row`: r within its sequence.
  static __device__ __forceinline__ DropoutLane Of(const Attention& a, int b, int h, int row,
                                                   int lane) {
    const uint64_t r = static_cast<uint64_t>(a.dropout.row) + row;
    DropoutLane at;
    at.seed = a.dropout.seed;
    at.head = static_cast<uint32_t>(a.dropout.head) + h;
    at.sequence = static_cast<uint32_t>(a.dropout.sequence) + b;
    at.first_row = static_cast<uint32_t>(r / 16 * 8 + r % 8);
    at.first_key = static_cast<uint32_t>(a.problem.key_offset / 16 * 4) + lane % 4;
    at.kept = static_cast<uint32_t>(kDropoutOne - a.problem.dropout) * 0x10001u;
    at.least = static_cast<uint32_t>(a.problem.dropout) << 16;
    at.apart = r / 8 % 2 != 0;
    return at;
  }

  // The bits of rows r + 16 * slice (words 0 and 1) and 8 further (words 2 and 3), for the 16 keys
  // from `key`, a multiple of 16, on. kAligned: `apart` is false in all lanes.
  template <bool kAligned>
  __device__ __forceinline__ DropoutBits Draw(int slice, int key) const {
    const uint32_t row = first_row + 8 * slice;
    const uint32_t keys = first_key + key / 16 * 4;
    const DropoutBits bits = DropoutPhilox(seed, row, keys, head, sequence);
    if (kAligned || __builtin_expect(!apart, 1)) return bits;
    const DropoutBits next = DropoutPhilox(seed, row + 8, keys, head, sequence);
    return {{bits.words[2], bits.words[3], next.words[0], next.words[1]}};
  }
};

}  // namespace attend::cuda
