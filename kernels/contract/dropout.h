// SPDX-License-Identifier: Apache-2.0
//
// Defines which weights dropout removes. With m_ij = 0 for a dropped weight and 65536 / (65536 -
// dropout) for a kept one:
//
//   O_i = sum_j P_ij m_ij V_j        dV_j = sum_i P_ij m_ij dO_i        dP_ij = m_ij (dO_i . V_j)
//
// The softmax, LSE and delta_i = dO_i . O_i are unaffected. m_ij is a function of the seed, the
// sequence, the query head, i and j alone, so that every kernel, tile, device and the backward pass
// drop the same weights without storing a mask. A dropped weight contributes nothing, even if V_j
// or dO_i is NaN.
//
// The bits are Philox4x32-7's (Salmon et al. 2011; seven rounds are the fewest that pass BigCrush,
// at two thirds of the cost of the usual ten). The key is the seed, the counter
//
//   (8 (i / 16) + i % 8,  4 (j / 16) + j % 8 / 2,  head,  sequence)
//
// and its 128 bits serve eight weights, 16 bits each: rows i and i + 8 by keys j, j + 1, j + 8 and
// j + 9, which is what one thread holds of a 16 x 16 tile after Tensor Core products. A weight is
// dropped if its 16 bits, as a number, are below problem.dropout.

#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/contract/portable.h"
#include "kernels/util/status.h"

namespace attend {

inline constexpr int32_t kDropoutOne = 1 << 16;  // Problem::dropout that would drop every weight
inline constexpr int kDropoutRounds = 7;
// Tiles whose first row and key are multiples of this contain whole groups of eight weights.
inline constexpr int kDropoutTile = 16;

// Problem::dropout for the drop probability p: the nearest multiple of 2^-16. INVALID_ARGUMENT
// naming `field` unless p is in [0, 1 - 2^-17).
Result<int32_t> DropoutSteps(std::string_view field, double p);

// Position of an attention within the whole that it is a slice of (AttentionSlice): added to its
// own sequence, query head and row. Problem::key_offset does the same for keys.
struct DropoutPlace {
  uint64_t seed = 0;
  int64_t sequence = 0;
  int64_t head = 0;
  int64_t row = 0;
};

// Factor of a kept weight.
ATTEND_HD inline float DropoutScale(int32_t dropout) {
  return static_cast<float>(kDropoutOne) / static_cast<float>(kDropoutOne - dropout);
}

// 128 bits; words[2 * rows8 + keys8] has the even key's 16 bits in its low half and the odd key's
// in its high half.
struct DropoutBits {
  uint32_t words[4];
};

ATTEND_HD inline DropoutBits DropoutPhilox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2,
                                           uint32_t c3) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kDropoutRounds; ++round) {
    const uint64_t product0 = uint64_t{0xd2511f53u} * c0;
    const uint64_t product1 = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// Bits of the group that contains row i and key j, counted in the whole.
ATTEND_HD inline DropoutBits DropoutGroup(uint64_t seed, int64_t sequence, int64_t head, int64_t i,
                                          int64_t j) {
  return DropoutPhilox(seed, static_cast<uint32_t>(i / 16 * 8 + i % 8),
                       static_cast<uint32_t>(j / 16 * 4 + j % 8 / 2), static_cast<uint32_t>(head),
                       static_cast<uint32_t>(sequence));
}

// The 16 bits of row i and key j within their group.
ATTEND_HD inline int32_t DropoutDraw(const DropoutBits& group, int64_t i, int64_t j) {
  const uint32_t word = group.words[i / 8 % 2 * 2 + j / 8 % 2];
  return static_cast<int32_t>(j % 2 == 0 ? word & 0xffffu : word >> 16);
}

// Whether the weight of row i and key j is kept: the plain, one-weight form.
ATTEND_HD inline bool DropoutKeeps(int32_t dropout, uint64_t seed, int64_t sequence, int64_t head,
                                   int64_t i, int64_t j) {
  return DropoutDraw(DropoutGroup(seed, sequence, head, i, j), i, j) >= dropout;
}

}  // namespace attend
