// SPDX-License-Identifier: Apache-2.0
//
// The decoding path's products in the tile unit, for cpu_flash_amx: bf16, D and Dv multiples of
// 32. Included once per instruction set by decode-inl.h; for those with AVX-512.
//
//   S^T = K Q^T    K in place, 32 keys at a time; Q as [pair of dims][row]
//   O += P V       P as [row][key], times 2^32 and rounded; V as [pair of keys][dim], in step order
//
// The unit counts subnormal numbers as 0. Rows of Q that fail FitsPairs have their scores computed
// without it. Rows that see all keys of a block have the second product in tiles if each element of
// the block's V is 0, or normal and at most 2^60; a sum over n keys then loses n 2^-157 at most.

#if defined(ATTEND_CPU_DECODE_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_DECODE_AMX_INL_H_
#undef ATTEND_CPU_DECODE_AMX_INL_H_
#else
#define ATTEND_CPU_DECODE_AMX_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/cpu/decode_math-inl.h"
#include "kernels/cpu/decode_run-inl.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/cpu/tile_unit.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {
#if ATTEND_IS_AVX512(HWY_TARGET)

constexpr float kDecodeScale = 0x1p32f;

// Transposes the rows of Q, which are packed as pairs, with zeros in the lanes after them.
void DecodeRun::PackTiles() {
  const int64_t lanes = TileLanes();
  for (int64_t r = rows_; r < lanes; ++r) std::fill_n(Pairs(r), p_.dim, uint16_t{0});
  for (int64_t r = 0; r < lanes; r += kTurned) {
    TurnIn(reinterpret_cast<const float*>(Pairs(r)), p_.dim / 2, p_.dim / 2, lanes,
           QueryTiles() + r);
  }
}

void DecodeRun::DotTiles(const BlockRows& keys, int64_t first, int64_t last, const NextRows& next) {
  const int64_t lanes = TileLanes();
  for (int64_t j = first / kAmxBlock * kAmxBlock; j < last; j += kAmxBlock) {
    // In place if rows are evenly apart.
    const auto* a = static_cast<const char*>(keys.at[j]);
    int64_t bytes = static_cast<const char*>(keys.at[j + 1]) - a;
    bool even = true;
    for (int64_t n = 1; n < kAmxBlock; ++n) even = even && keys.at[j + n] == a + n * bytes;
    if (!even) {
      bytes = p_.dim * 2;
      for (int64_t n = 0; n < kAmxBlock; ++n) {
        std::memcpy(reinterpret_cast<char*>(s_.k) + n * bytes, keys.at[j + n],
                    static_cast<size_t>(bytes));
      }
      a = reinterpret_cast<const char*>(s_.k);
    }
    CurrentTileUnit().multiply(a, bytes, QueryTiles(), p_.dim / kAmxBlock,
                               static_cast<int>(lanes / kLanes), s_.rows);
    for (int64_t n = 0; n < kAmxBlock; n += kTurned) {
      next.Prefetch(j + n, kTurned);
      TurnIn(s_.rows + n * lanes, lanes, (rows_ + kTurned - 1) / kTurned * kTurned, kKeyTile,
             Scores(0) + j + n);
    }
  }
}

// Packs a block's V. False if tiles cannot take it.
HWY_NOINLINE bool DecodeRun::PackValueTiles(const BlockRows& values, const NextRows& next) {
  const Words d;
  const hn::RebindToUnsigned<F32> du;
  constexpr uint16_t kLeast = 1 << 7, kMost = (127 + 60) << 7;
  const VWords one = hn::Set(d, uint16_t{1}), size = hn::Set(d, uint16_t{0x7fff});
  VWords least = hn::Set(d, uint16_t{0xffff}), most = hn::Zero(d);
  for (int64_t j = 0; j < kKeyTile; j += 2) {
    const auto* const even_row = static_cast<const uint16_t*>(values.at[j]);
    const auto* const odd_row = static_cast<const uint16_t*>(values.at[j + 1]);
    next.Prefetch(j, 2);
    for (int64_t i = 0; i < p_.dim_v; i += kAmxBlock) {
      const VWords a = hn::LoadU(d, even_row + i), b = hn::LoadU(d, odd_row + i);
      for (const VWords x : {a, b}) {
        const VWords abs = hn::And(x, size);
        least = hn::Min(least, hn::Sub(abs, one));  // 0 becomes the largest
        most = hn::Max(most, abs);
      }
      uint16_t* const to = ValueTiles() + (i * kKeyTile / 2 + j / 2 * kAmxBlock) * 2;
      const VWords raised = hn::BitCast(d, hn::ShiftLeft<16>(hn::BitCast(du, b)));
      const VWords lowered = hn::BitCast(d, hn::ShiftRight<16>(hn::BitCast(du, a)));
      hn::Store(hn::OddEven(raised, a), d, to);                // elements 0, 2, ... of both rows
      hn::Store(hn::OddEven(b, lowered), d, to + 2 * kLanes);  // 1, 3, ...
    }
  }
  const auto fits = hn::And(hn::Eq(hn::Max(least, hn::Set(d, uint16_t{kLeast - 1})), least),
                            hn::Eq(hn::Min(most, hn::Set(d, kMost)), most));
  return hn::AllTrue(d, fits);
}

// AddValues for the rows that see all keys of the block, whose V is packed.
void DecodeRun::AddValueTiles() {
  const F32 d;
  const Words dw;
  const V32 up = hn::Set(d, kDecodeScale), down = hn::Set(d, 1 / kDecodeScale);
  uint16_t* const weights = WeightTiles();
  for (int64_t r = 0; r < kAmxBlock; ++r) {
    for (int64_t n = 0; n < kKeyTile; n += 2 * kLanes) {
      VWords rounded = hn::Zero(dw);
      if (r < whole_count_) {
        const float* const p = Scores(whole_[r]) + n;
        rounded = RoundBoth(hn::Mul(hn::Load(d, p), up), hn::Mul(hn::Load(d, p + kLanes), up));
      }
      hn::Store(rounded, dw, weights + r * kKeyTile + n);
    }
  }
  for (int64_t i = 0; i < p_.dim_v; i += kAmxBlock) {
    CurrentTileUnit().multiply(weights, kKeyTile * 2, ValueTiles() + i * kKeyTile,
                               kKeyTile / kAmxBlock, 2, s_.rows);
    for (int64_t r = 0; r < whole_count_; ++r) {
      const V32 before = hn::Set(d, s_.weight[whole_[r]]);
      for (int64_t n = 0; n < kAmxBlock; n += kLanes) {
        float* const o = O(whole_[r]) + i + n;
        const V32 sum = hn::Mul(hn::Load(d, s_.rows + r * kAmxBlock + n), down);
        hn::Store(hn::MulAdd(before, hn::Load(d, o), sum), d, o);
      }
    }
  }
}

#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
