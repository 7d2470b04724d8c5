// SPDX-License-Identifier: Apache-2.0
//
// Dropout's draws (dropout.h) for tiles. Each 64-bit lane computes one group, since a round of
// Philox needs 64-bit products. Included once per instruction set.

#if defined(ATTEND_CPU_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_DROPOUT_INL_H_
#undef ATTEND_CPU_DROPOUT_INL_H_
#else
#define ATTEND_CPU_DROPOUT_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/contract/problem.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_tile.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

using U64 = hn::ScalableTag<uint64_t>;
using V64 = hn::Vec<U64>;
constexpr int64_t kGroups = hn::MaxLanes(U64());

// The product of each lane's lower half.
HWY_INLINE V64 MultiplyLower(V64 x, V64 y) {
  const U64 d;
#if HWY_TARGET == HWY_SCALAR
  return hn::Mul(hn::And(x, hn::Set(d, 0xffffffffu)), y);
#else
  const hn::Repartition<uint32_t, U64> halves;
  return hn::BitCast(d, hn::MulEven(hn::BitCast(halves, x), hn::BitCast(halves, y)));
#endif
}

// Moves each lane's upper half to the lower one; the new upper half is undefined.
HWY_INLINE V64 UpperHalves(V64 x) {
#if HWY_TARGET == HWY_SCALAR
  return hn::ShiftRight<32>(x);
#else
  // Shuffles have their own port; shifts of wide vectors share one with products.
  const U64 d;
  const hn::Repartition<uint32_t, U64> halves;
  return hn::BitCast(d, hn::Shuffle2301(hn::BitCast(halves, x)));
#endif
}

// Philox's keys of all rounds.
struct RoundKeys {
  explicit HWY_INLINE RoundKeys(uint64_t seed) {
    for (int round = 0; round < kDropoutRounds; ++round) {
      const auto n = static_cast<uint32_t>(round);
      lower[round] = hn::Set(U64(), static_cast<uint32_t>(seed) + n * 0x9e3779b9u);
      upper[round] = hn::Set(U64(), static_cast<uint32_t>(seed >> 32) + n * 0xbb67ae85u);
    }
  }
  V64 lower[kDropoutRounds], upper[kDropoutRounds];
};

// DropoutPhilox for a vector of counters. The lanes' upper halves are ignored and undefined after.
HWY_INLINE void PhiloxLanes(const RoundKeys& keys, V64& c0, V64& c1, V64& c2, V64& c3) {
  const V64 multiplier0 = hn::Set(U64(), 0xd2511f53u);
  const V64 multiplier1 = hn::Set(U64(), 0xcd9e8d57u);
  HWY_UNROLL(7)
  for (int round = 0; round < kDropoutRounds; ++round) {
    const V64 product0 = MultiplyLower(c0, multiplier0);
    const V64 product1 = MultiplyLower(c2, multiplier1);
    c0 = hn::Xor3(UpperHalves(product1), c1, keys.lower[round]);
    c1 = product1;
    c2 = hn::Xor3(UpperHalves(product0), c3, keys.upper[round]);
    c3 = product0;
  }
}

// A run of 16 rows that begins at a multiple of 16, and its head, both counted in the whole.
struct RowBlock {
  int64_t row;
  int64_t head;
};

// Computes the draws of a block's 16 rows by the 16 keys from `key` on, a multiple of 16, as
// words[pair of keys][row] with two draws to a word.
HWY_INLINE void DrawRows(const RoundKeys& round_keys, uint64_t sequence, const RowBlock& block,
                         int64_t key, uint32_t* words) {
  const U64 d;
  const hn::Rebind<uint32_t, U64> narrow;
  constexpr int64_t kPairs = kDropoutTile / 4;  // pairs of keys in a tile's lower half
  const V64 rows = hn::Add(hn::Iota(d, 0), hn::Set(d, static_cast<uint64_t>(block.row / 2)));
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    for (int64_t at = 0; at < kDropoutTile / 2; at += kGroups) {
      V64 w0 = hn::Add(rows, hn::Set(d, static_cast<uint64_t>(at)));
      V64 w1 = hn::Set(d, static_cast<uint64_t>(key / 4 + pair));
      V64 w2 = hn::Set(d, static_cast<uint64_t>(block.head));
      V64 w3 = hn::Set(d, sequence);
      PhiloxLanes(round_keys, w0, w1, w2, w3);
      uint32_t* const low = words + pair * kDrawStride + at;
      uint32_t* const high = low + kPairs * kDrawStride;
      hn::StoreU(hn::TruncateTo(narrow, w0), narrow, low);
      hn::StoreU(hn::TruncateTo(narrow, w2), narrow, low + kDropoutTile / 2);
      hn::StoreU(hn::TruncateTo(narrow, w1), narrow, high);
      hn::StoreU(hn::TruncateTo(narrow, w3), narrow, high + kDropoutTile / 2);
    }
  }
}

// Replaces dropped weights of [key][lane] by -0, the weight of a hidden key (Softmax). The lanes'
// rows begin `offset` rows after the first block's. Keys are counted in the whole.
HWY_INLINE void DropWeights(const Attention& a, int64_t b, const RowBlock* blocks, int64_t offset,
                            int64_t lanes, int64_t key, int64_t keys, uint32_t* words,
                            float* weights) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const auto limit = hn::Set(du, static_cast<uint32_t>(a.problem.dropout) << 16);
  const V32 none = hn::Set(d, -0.0f);
  const RoundKeys round_keys(a.dropout.seed);
  const auto sequence = static_cast<uint64_t>(a.dropout.sequence + b);
  for (int64_t tile = key - key % kDropoutTile; tile < key + keys; tile += kDropoutTile) {
    for (int64_t row = 0; row < offset + lanes; row += kDropoutTile) {
      DrawRows(round_keys, sequence, blocks[row / kDropoutTile], tile, words + row);
    }
    const int64_t end = std::min(key + keys, tile + kDropoutTile);
    for (int64_t j = std::max(key, tile); j < end; ++j) {
      const uint32_t* const from = words + (j - tile) / 2 * kDrawStride + offset;
      float* const to = weights + (j - key) * lanes;
      for (int64_t n = 0; n < lanes; n += kLanes) {
        auto draw = hn::LoadU(du, from + n);
        if (j % 2 == 0) draw = hn::ShiftLeft<16>(draw);  // lower bits of an odd key decide nothing
        const auto dropped = hn::RebindMask(d, hn::Lt(draw, limit));
        hn::Store(hn::IfThenElse(dropped, none, hn::Load(d, to + n)), d, to + n);
      }
    }
  }
}

// Stores each lane's draws of two neighbouring keys, in order.
HWY_INLINE void StoreDraws(V64 words, uint16_t* to) {
  const hn::Rebind<uint32_t, U64> narrow;
#if HWY_TARGET == HWY_SCALAR
  const uint32_t word = hn::GetLane(hn::TruncateTo(narrow, words));
  to[0] = static_cast<uint16_t>(word);
  to[1] = static_cast<uint16_t>(word >> 16);
#else
  const hn::Repartition<uint16_t, decltype(narrow)> draws;
  const auto all = hn::BitCast(draws, hn::TruncateTo(narrow, words));
  // Four lanes are half a tile; the next four belong to the next tile.
  if constexpr (kGroups > 4) {
    const hn::Half<decltype(draws)> half;
    hn::StoreU(hn::LowerHalf(half, all), half, to);
    hn::StoreU(hn::UpperHalf(half, all), half, to + kDropoutTile);
  } else {
    hn::StoreU(all, draws, to);
  }
#endif
}

// Computes the draws of row `low` and of row `low` + 8 for keys [key, key + keys), counted in the
// whole. `key` must be a multiple of 16; up to 31 more draws are written.
HWY_INLINE void DrawKeys(const RoundKeys& round_keys, uint64_t sequence, int64_t head, int64_t low,
                         int64_t key, int64_t keys, uint16_t* low_draws, uint16_t* high_draws) {
  const U64 d;
  constexpr int64_t kHalf = kDropoutTile / 2;
  const auto row = static_cast<uint64_t>(low / kDropoutTile * kHalf + low % kHalf);
  const V64 first = hn::Add(hn::Iota(d, 0), hn::Set(d, static_cast<uint64_t>(key / 4)));
  for (int64_t n = 0; n < (keys + kDropoutTile - 1) / kDropoutTile * 4; n += kGroups) {
    V64 w0 = hn::Set(d, row);
    V64 w1 = hn::Add(first, hn::Set(d, static_cast<uint64_t>(n)));
    V64 w2 = hn::Set(d, static_cast<uint64_t>(head));
    V64 w3 = hn::Set(d, sequence);
    PhiloxLanes(round_keys, w0, w1, w2, w3);
    const int64_t at = n / 4 * kDropoutTile + n % 4 * 2;
    StoreDraws(w0, low_draws + at);
    StoreDraws(w1, low_draws + at + kHalf);
    StoreDraws(w2, high_draws + at);
    StoreDraws(w3, high_draws + at + kHalf);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
