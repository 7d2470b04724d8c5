// SPDX-License-Identifier: Apache-2.0
//
// Moves rows of tensors into and out of cpu_flash's scratch: converts them to fp32 and back, and
// transposes Q, O and bias so that rows lie across lanes. Included once per instruction set.

#if defined(ATTEND_CPU_FLASH_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_CPU_FLASH_PACK_INL_H_
#undef ATTEND_CPU_FLASH_PACK_INL_H_
#else
#define ATTEND_CPU_FLASH_PACK_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/contract/dtype.h"
#include "kernels/cpu/flash_math-inl.h"
#include "kernels/cpu/flash_tile.h"

HWY_BEFORE_NAMESPACE();
namespace attend::cpu_flash {
namespace HWY_NAMESPACE {

// Calls f<DType>() for Q, K, V or O; Select refuses other dtypes.
template <class F>
HWY_INLINE auto WithDType(DType dtype, const F& f) {
  if (dtype == DType::kFloat16) return f.template operator()<DType::kFloat16>();
  if (dtype == DType::kBFloat16) return f.template operator()<DType::kBFloat16>();
  return f.template operator()<DType::kFloat32>();
}

// Widens Lanes(d) elements from `index` on to fp32.
template <DType kType, class D>
HWY_INLINE hn::Vec<D> LoadWide(D d, const void* data, int64_t index) {
  if constexpr (kType == DType::kFloat32) {
    return hn::LoadU(d, static_cast<const float*>(data) + index);
  } else if constexpr (kType == DType::kFloat16) {
#if ATTEND_HAVE_F16
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(d, hn::LoadU(dh, static_cast<const hwy::float16_t*>(data) + index));
#else
    alignas(64) float wide[hn::MaxLanes(D())];
    for (int64_t n = 0; n < static_cast<int64_t>(hn::Lanes(d)); ++n) {
      wide[n] = HalfToFloat(static_cast<const uint16_t*>(data)[index + n]);
    }
    return hn::Load(d, wide);
#endif
  } else {
    const hn::Rebind<uint16_t, D> dh;
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::PromoteTo(du, hn::LoadU(dh, static_cast<const uint16_t*>(data) + index));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
}

template <DType kType>
HWY_INLINE void WidenRowOf(const void* data, int64_t index, int64_t dim, float* out) {
  const F32 d;
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    hn::StoreU(LoadWide<kType>(d, data, index + i), d, out + i);
  }
  for (; i < dim; ++i) out[i] = LoadElement(data, kType, index + i);
}

// Widens one row of `dim` elements to fp32.
HWY_INLINE void WidenRow(const void* data, DType dtype, int64_t index, int64_t dim, float* out) {
  if (dtype == DType::kBit) return LoadElements(data, dtype, index, dim, out);
  WithDType(dtype, [&]<DType kType>() { WidenRowOf<kType>(data, index, dim, out); });
}

template <DType kType>
HWY_INLINE void NarrowRowOf(const float* row, float factor, int64_t dim, void* data,
                            int64_t index) {
  const F32 d;
  const V32 by = hn::Set(d, factor);
  int64_t i = 0;
  if constexpr (kType == DType::kFloat32) {
    float* out = static_cast<float*>(data) + index;
    for (; i + kLanes <= dim; i += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, row + i), by), d, out + i);
    }
  }
#if ATTEND_HAVE_F16
  if constexpr (kType == DType::kFloat16) {
    const hn::Rebind<hwy::float16_t, F32> dh;
    hwy::float16_t* out = static_cast<hwy::float16_t*>(data) + index;
    for (; i + kLanes <= dim; i += kLanes) {
      hn::StoreU(hn::DemoteTo(dh, hn::Mul(hn::LoadU(d, row + i), by)), dh, out + i);
    }
  }
#endif
  for (; i < dim; ++i) StoreElement(data, kType, index + i, row[i] * factor);
}

// Stores one fp32 row in the dtype; each element is multiplied by `factor` and rounded once.
HWY_INLINE void NarrowRow(const float* row, float factor, int64_t dim, DType dtype, void* data,
                          int64_t index) {
  WithDType(dtype, [&]<DType kType>() { NarrowRowOf<kType>(row, factor, dim, data, index); });
}

// Floats from one block of V's columns to the next. The gap keeps blocks out of each other's cache
// sets.
constexpr int64_t ValueBlockStride(int64_t rows) { return rows * kValueBlock + kValueGap; }

template <DType kType>
bool PackValuesOf(const void* data, int64_t index, int64_t stride, int64_t rows,
                  int64_t block_stride, int64_t dim, float* out) {
  const hn::CappedTag<float, kValueBlock> d;
  const int64_t whole = dim / kValueBlock;
  auto zero = hn::Zero(d);  // NaN once a value is not finite
  float rest = 0;
  for (int64_t j = 0; j < rows; ++j) {  // row by row, for the hardware prefetcher
    const int64_t row = index + j * stride;
    float* at = out + j * kValueBlock;
    for (int64_t block = 0; block < whole; ++block) {
      for (int64_t n = 0; n < kValueBlock; n += static_cast<int64_t>(hn::Lanes(d))) {
        const int64_t i = block * kValueBlock + n;
        const auto values = LoadWide<kType>(d, data, row + i);
        zero = hn::MulAdd(values, hn::Zero(d), zero);
        hn::Store(values, d, at + block * block_stride + n);
      }
    }
    for (int64_t i = whole * kValueBlock; i < (dim + kValueBlock - 1) / kValueBlock * kValueBlock;
         ++i) {
      const float value = i < dim ? LoadElement(data, kType, row + i) : 0.0f;
      rest += value * 0.0f;
      at[whole * block_stride + i % kValueBlock] = value;
    }
  }
  return rest == 0 && hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

// Packs `rows` rows, `stride` apart, as fp32 blocks of [row][kValueBlock], `block_stride` apart.
// Columns beyond dim are 0. Whether all values are finite.
HWY_INLINE bool PackValues(const void* data, DType dtype, int64_t index, int64_t stride,
                           int64_t rows, int64_t block_stride, int64_t dim, float* out) {
  return WithDType(dtype, [&]<DType kType>() {
    return PackValuesOf<kType>(data, index, stride, rows, block_stride, dim, out);
  });
}

// Rows that are transposed together, between memory (along dims) and panels (across lanes).
constexpr int64_t kTurned = kLanes < 4 ? 1 : 4;

// Transposes kTurned rows of n floats into neighbouring lanes:
// out[i * width + r] = rows[r * stride + i].
HWY_INLINE void TurnIn(const float* HWY_RESTRICT rows, int64_t stride, int64_t n, int64_t width,
                       float* HWY_RESTRICT out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> d64;
  for (; i + 4 <= n; i += 4) {
    const auto a = hn::LoadU(d, rows + i);
    const auto b = hn::LoadU(d, rows + stride + i);
    const auto c = hn::LoadU(d, rows + 2 * stride + i);
    const auto e = hn::LoadU(d, rows + 3 * stride + i);
    const auto ab0 = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
    const auto ab1 = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
    const auto ce0 = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
    const auto ce1 = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
    float* at = out + i * width;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, ab0, ce0)), d, at);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, ab0, ce0)), d, at + width);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, ab1, ce1)), d, at + 2 * width);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, ab1, ce1)), d, at + 3 * width);
  }
#endif
  for (; i < n; ++i) {
    for (int64_t r = 0; r < kTurned; ++r) out[i * width + r] = rows[r * stride + i];
  }
}

// The reverse: rows[r * stride + i] = in[i * width + r].
HWY_INLINE void TurnOut(const float* in, int64_t width, int64_t n, int64_t stride, float* rows) {
  int64_t i = 0;
  // A square block is transposed by the same moves in both directions.
  for (; i + kTurned <= n; i += kTurned) {
    TurnIn(in + i * width, width, kTurned, stride, rows + i);
  }
  for (; i < n; ++i) {
    for (int64_t r = 0; r < kTurned; ++r) rows[r * stride + i] = in[i * width + r];
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace attend::cpu_flash
HWY_AFTER_NAMESPACE();

#endif  // include guard
