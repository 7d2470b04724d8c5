// SPDX-License-Identifier: Apache-2.0
//
// The products of cpu_flash's decoding path. Rows of K and V are read in place and widened in
// registers, with lanes along the head dimension. Included once per instruction set by decode.cc.

#if defined(ATTEND_CPU_DECODE_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_DECODE_MATH_INL_H_
#undef ATTEND_CPU_DECODE_MATH_INL_H_
#else
#define ATTEND_CPU_DECODE_MATH_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/contract/dtype.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_pack-inl.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/target_kind.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// Accumulators that fit the register file beside the operands.
#if ATTEND_IS_AVX512(HWY_TARGET) || HWY_TARGET == HWY_NEON
constexpr int kSums = 16;
#else
constexpr int kSums = 8;
#endif

// Rows are read in steps. A step's vectors hold its elements in order, except for bf16: there the
// first has the even elements and the second the odd ones, since each half of a word is widened by
// one instruction.
template <DType kType>
constexpr int kStepVectors = kType == DType::kBFloat16&& HWY_TARGET != HWY_SCALAR ? 2 : 1;
template <DType kType>
constexpr int64_t kStep = kStepVectors<kType>* kLanes;

// The element within a step that is in lane `lane`, counted over the step's vectors.
template <DType kType>
HWY_INLINE int64_t StepElement(int64_t lane) {
  if constexpr (kStepVectors<kType> == 1) return lane;
  return lane < kLanes ? 2 * lane : 2 * (lane - kLanes) + 1;
}

// First element of step t of a row of `dim` >= kStep elements. The last step may overlap the one
// before, so that no element beyond the row is read.
template <DType kType>
HWY_INLINE int64_t StepBegin(int64_t t, int64_t dim) {
  return t * kStep<kType> < dim - kStep<kType> ? t * kStep<kType> : dim - kStep<kType>;
}
template <DType kType>
HWY_INLINE int64_t Steps(int64_t dim) {
  return (dim + kStep<kType> - 1) / kStep<kType>;
}

// Vector kVector of the step that begins at element `begin`.
template <DType kType, int kVector>
HWY_INLINE V32 LoadStep(const void* row, int64_t begin) {
  const F32 d;
  if constexpr (kStepVectors<kType> == 2) {
    const hn::ScalableTag<uint16_t> dh;
    const hn::RebindToUnsigned<F32> du;
    const auto words = hn::BitCast(du, hn::LoadU(dh, static_cast<const uint16_t*>(row) + begin));
    if constexpr (kVector == 0) return hn::BitCast(d, hn::ShiftLeft<16>(words));
    return hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u)));
  } else {
    return LoadWide<kType>(d, row, begin);
  }
}

// How rows of a matrix are read. `type` determines the steps. Rows shorter than a step are first
// widened to scratch and padded with zeros.
struct RowShape {
  DType type;
  int64_t dim;    // as read
  int64_t width;  // of all steps of a row
  bool widened;
};

HWY_INLINE RowShape ShapeOf(DType type, int64_t dim) {
  const int64_t step = type == DType::kBFloat16 ? kStep<DType::kBFloat16> : kLanes;
  if (dim >= step) return {type, dim, (dim + step - 1) / step * step, false};
  const int64_t whole = (dim + kLanes - 1) / kLanes * kLanes;
  return {DType::kFloat32, whole, whole, true};
}

// Calls body(element, place, again) for each place in step order, with the element of the row that
// it holds; `again` if the step before holds that element too.
template <DType kType, class Body>
HWY_INLINE void ForEachPlaceOf(int64_t dim, const Body& body) {
  for (int64_t t = 0; t < Steps<kType>(dim); ++t) {
    for (int64_t n = 0; n < kStep<kType>; ++n) {
      const int64_t element = StepBegin<kType>(t, dim) + StepElement<kType>(n);
      body(element, t * kStep<kType> + n, element < t * kStep<kType>);
    }
  }
}
template <class Body>
HWY_INLINE void ForEachPlace(const RowShape& shape, const Body& body) {
  if (shape.type == DType::kBFloat16) return ForEachPlaceOf<DType::kBFloat16>(shape.dim, body);
  ForEachPlaceOf<DType::kFloat32>(shape.dim, body);
}

// Addresses of one key tile's rows of K or V. Places before the first key seen repeat its address,
// places after the last key seen repeat that one's.
struct BlockRows {
  int64_t dim;
  const void* at[kKeyTile];
};

// The rows that come next, and which of their bytes to prefetch into L2. L1 cannot track as many
// outstanding lines as memory latency requires.
struct NextRows {
  const BlockRows* rows = nullptr;
  int64_t begin = 0;
  int64_t end = 0;

  HWY_INLINE void Prefetch(int64_t first, int64_t count) const {
    constexpr int64_t kLine = 64;
    if (begin >= end) return;
    for (int64_t j = first; j < first + count; ++j) {
      const char* at = static_cast<const char*>(rows->at[j]);
      for (int64_t n = begin; n < end; n += kLine) __builtin_prefetch(at + n, 0, 2);
    }
  }
  // Parts [from, to) of `of`, in whole lines.
  HWY_INLINE NextRows Part(int64_t from, int64_t to, int64_t of) const {
    constexpr int64_t kLine = 64;
    const int64_t lines = (end - begin + kLine - 1) / kLine;
    return {rows, begin + from * lines / of * kLine,
            std::min(end, begin + to * lines / of * kLine)};
  }
};

#if HWY_TARGET != HWY_SCALAR
// Adds up blocks of four lanes.
template <class V>
HWY_INLINE void StoreFour(V sums, float* out) {
  const hn::DFromV<V> d;
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<decltype(d)> half;
    StoreFour(hn::Add(hn::LowerHalf(half, sums), hn::UpperHalf(half, sums)), out);
  } else {
    hn::StoreU(sums, d, out);
  }
}
#endif

// Stores the lane sums of four vectors to out[0..3], all added in the same order.
HWY_INLINE void StoreSums(V32 a, V32 b, V32 c, V32 e, float* out) {
#if HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(a);
  out[1] = hn::GetLane(b);
  out[2] = hn::GetLane(c);
  out[3] = hn::GetLane(e);
#else
  const F32 d;
  const hn::Repartition<double, F32> d64;
  const auto pairs = [&](V32 x, V32 y) {
    return hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y)));
  };
  const auto ab = pairs(a, b);
  const auto ce = pairs(c, e);
  const V32 sums = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, ab, ce)),
                           hn::BitCast(d, hn::InterleaveUpper(d64, ab, ce)));
  StoreFour(sums, out);
#endif
}

template <DType kType, int kRows, int kKeys, int kVector>
HWY_INLINE void DotStep(const BlockRows& keys, int64_t j, int64_t begin, const float* q,
                        int64_t width, V32 (&sum)[kRows][kKeys]) {
  const F32 d;
  V32 key[kKeys];
  HWY_UNROLL(8)
  for (int k = 0; k < kKeys; ++k) key[k] = LoadStep<kType, kVector>(keys.at[j + k], begin);
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    const V32 row = hn::Load(d, q + r * width + kVector * kLanes);
    HWY_UNROLL(8)
    for (int k = 0; k < kKeys; ++k) sum[r][k] = hn::MulAdd(row, key[k], sum[r][k]);
  }
}

// As DotStep, for a whole step of bf16 rows that pass FitsPairs.
template <DType kType, int kRows, int kKeys>
HWY_INLINE void DotPairs(const BlockRows& keys, int64_t j, int64_t begin, const uint16_t* q,
                         int64_t width, V32 (&sum)[kRows][kKeys]) {
  const Words d;
  VWords key[kKeys];
  HWY_UNROLL(8)
  for (int k = 0; k < kKeys; ++k) {
    key[k] = hn::LoadU(d, static_cast<const uint16_t*>(keys.at[j + k]) + begin);
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    const VWords row = hn::Load(d, q + r * width);
    HWY_UNROLL(8)
    for (int k = 0; k < kKeys; ++k) sum[r][k] = AddPairs(sum[r][k], row, key[k]);
  }
}

// s[r * kKeyTile + j + k] = q_r . key j + k, for kRows rows of Q, `width` elements apart, and kKeys
// keys. A row's bits do not depend on kRows or kKeys. Rows of Q are fp32 in step order, or bf16
// words in memory order, to be added in pairs.
template <DType kType, int kRows, int kKeys, class Element>
HWY_INLINE void DotBlock(const BlockRows& keys, int64_t j, const Element* q, int64_t width,
                         float* s) {
  const F32 d;
  V32 sum[kRows][kKeys];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int k = 0; k < kKeys; ++k) sum[r][k] = hn::Zero(d);
  }
  const int64_t steps = Steps<kType>(keys.dim);
  for (int64_t t = 0; t < steps; ++t) {
    const int64_t begin = StepBegin<kType>(t, keys.dim);
    const Element* at = q + t * kStep<kType>;
    if constexpr (std::is_same_v<Element, uint16_t>) {
      DotPairs<kType, kRows, kKeys>(keys, j, begin, at, width, sum);
    } else {
      DotStep<kType, kRows, kKeys, 0>(keys, j, begin, at, width, sum);
      if constexpr (kStepVectors<kType> == 2) {
        DotStep<kType, kRows, kKeys, 1>(keys, j, begin, at, width, sum);
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(2)
    for (int k = 0; k < kKeys; k += 4) {
      StoreSums(sum[r][k], sum[r][k + 1], sum[r][k + 2], sum[r][k + 3], s + r * kKeyTile + j + k);
    }
  }
}

// Rows of a block's weights and of O.
template <int kRows>
struct WeightRows {
  const float* p[kRows];
  float* o[kRows];
  float before[kRows];  // factor for O so far
};

// For each row r and the elements of kSteps steps from step t on: o = before * o + sum over keys
// [first, last) of p * v, where the sum is computed first, from zero. With kSkip, keys of weight -0
// are skipped, whatever their value, and NaN and Inf are felt, however small the factor (NotZero).
template <DType kType, int kRows, int kSteps, bool kSkip>
HWY_INLINE void AccumulateSteps(const BlockRows& values, int64_t first, int64_t last, int64_t t,
                                const WeightRows<kRows>& rows, const NextRows& next) {
  constexpr int kVectors = kStepVectors<kType>;
  const F32 d;
  V32 sum[kRows][kSteps * kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(16)
    for (int n = 0; n < kSteps * kVectors; ++n) sum[r][n] = hn::Zero(d);
  }
  for (int64_t j = first; j < last; ++j) {
    next.Prefetch(j, 1);
    if (kSkip && std::bit_cast<uint32_t>(rows.p[0][j]) == 0x80000000u) continue;
    V32 weight[kRows];
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) weight[r] = hn::Set(d, rows.p[r][j]);
    HWY_UNROLL(8)
    for (int n = 0; n < kSteps; ++n) {
      const int64_t begin = StepBegin<kType>(t + n, values.dim);
      const V32 value = LoadStep<kType, 0>(values.at[j], begin);
      const auto add = [&](V32 x, V32 w, V32 to) {
        if (kSkip) w = hn::IfThenElse(hn::IsFinite(x), w, NotZero(w));
        return hn::MulAdd(w, x, to);
      };
      HWY_UNROLL(8)
      for (int r = 0; r < kRows; ++r) {
        sum[r][n * kVectors] = add(value, weight[r], sum[r][n * kVectors]);
      }
      if constexpr (kVectors == 2) {
        const V32 odd = LoadStep<kType, 1>(values.at[j], begin);
        HWY_UNROLL(8)
        for (int r = 0; r < kRows; ++r) {
          sum[r][n * kVectors + 1] = add(odd, weight[r], sum[r][n * kVectors + 1]);
        }
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    const V32 before = hn::Set(d, rows.before[r]);
    HWY_UNROLL(16)
    for (int n = 0; n < kSteps * kVectors; ++n) {
      float* at = rows.o[r] + (t * kVectors + n) * kLanes;
      const V32 o = hn::Load(d, at);
      const V32 by = kSkip ? hn::IfThenElse(hn::IsFinite(o), before, NotZero(before)) : before;
      hn::Store(hn::MulAdd(by, o, sum[r][n]), d, at);
    }
  }
}

// The same for all steps from t on: as many at a time as fit the registers, then the rest. Each
// round prefetches its part of the `next` rows.
template <DType kType, int kRows, int kSteps, bool kSkip>
HWY_INLINE void AccumulateFrom(const BlockRows& values, int64_t first, int64_t last, int64_t t,
                               const WeightRows<kRows>& rows, const NextRows& next) {
  const int64_t steps = Steps<kType>(values.dim);
  for (; t + kSteps <= steps; t += kSteps) {
    AccumulateSteps<kType, kRows, kSteps, kSkip>(values, first, last, t, rows,
                                                 next.Part(t, t + kSteps, steps));
  }
  if constexpr (kSteps > 1) {
    if (t < steps) {
      AccumulateFrom<kType, kRows, kSteps / 2, kSkip>(values, first, last, t, rows, next);
    }
  }
}

template <DType kType, int kRows, bool kSkip>
HWY_NOINLINE void Accumulate(const BlockRows& values, int64_t first, int64_t last,
                             const WeightRows<kRows>& rows, const NextRows& next) {
  constexpr int kVectors = kSums / kRows < 8 ? kSums / kRows : 8;
  constexpr int kSteps = kVectors / kStepVectors<kType>;
  AccumulateFrom<kType, kRows, kSteps, kSkip>(values, first, last, 0, rows, next);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
