// SPDX-License-Identifier: Apache-2.0
//
// Element types and their exact conversions on the host. float -> fp16/bf16 rounds to nearest,
// ties to even; NaN stays NaN; subnormals are kept.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>

namespace attend {

// Values equal attend.v1.DType on the wire, except float64, which exists only in process, for
// finite differences of cpu_reference. kBit is a mask's, eight elements to a byte from the lowest
// bit on: as a bias, 0 where set and -inf where clear. kDTypes has neither.
enum class DType : int32_t {
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat32 = 3,
  kBit = 4,
  kFloat64 = 64,
};

inline constexpr std::array kDTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

// Whether an untrusted number is a DType.
constexpr bool IsDType(int32_t number) {
  return std::any_of(kDTypes.begin(), kDTypes.end(),
                     [=](DType dtype) { return static_cast<int32_t>(dtype) == number; });
}

// Bytes of one element; 0 for bits.
constexpr int64_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kBit:
      return 0;
  }
  return 0;
}

// Bytes of a row of `elements`.
constexpr int64_t RowBytes(DType dtype, int64_t elements) {
  return dtype == DType::kBit ? elements / 8 + (elements % 8 != 0) : elements * DTypeBytes(dtype);
}

// Element `index` of a row of bits, as a bias. `index` may be negative, as strides may.
constexpr float BitAsBias(const uint8_t* bits, int64_t index) {
  return (bits[index >> 3] >> (static_cast<uint32_t>(index) & 7u) & 1u)
             ? 0.0f
             : -std::numeric_limits<float>::infinity();
}

constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBit:
      return "bit";
  }
  return "unknown";
}

// Unit roundoff u: |round(x) - x| <= u * |x| for normal results.
constexpr double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kBit:
      return 0.0;
  }
  return 1.0;
}

inline float BFloat16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  const uint32_t rounding = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits + rounding) >> 16);
}

// Branch-free, so that loops over it vectorise.
inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  // The product moves the exponent's bias from 15 to 127; it is exact, for subnormals too.
  const float scaled = std::bit_cast<float>(static_cast<uint32_t>(half & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t inf_or_nan = scaled >= 0x1p16f ? 0x7f800000u : 0u;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled) | inf_or_nan);
}

inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to Inf
  if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 aligns the mantissa so that the FPU rounds at bit 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounding = 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + rounding) >> 13));
}

// Element `index` of an array of `dtype`, widened exactly (float64: rounded).
inline float LoadElement(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return HalfToFloat(static_cast<const uint16_t*>(data)[index]);
    case DType::kBFloat16:
      return BFloat16ToFloat(static_cast<const uint16_t*>(data)[index]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat64:
      return static_cast<float>(static_cast<const double*>(data)[index]);
    case DType::kBit:
      return BitAsBias(static_cast<const uint8_t*>(data), index);
  }
  return 0.0f;
}

// The same in double, which holds every value of every dtype.
inline double LoadElementAsDouble(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat64) return static_cast<const double*>(data)[index];
  return static_cast<double>(LoadElement(data, dtype, index));
}

// Elements [index, index + count) of an array of `dtype`, widened as by LoadElement.
inline void LoadElements(const void* data, DType dtype, int64_t index, int64_t count, float* out) {
  const uint16_t* const narrow = static_cast<const uint16_t*>(data) + index;
  switch (dtype) {
    case DType::kFloat16:
      for (int64_t n = 0; n < count; ++n) out[n] = HalfToFloat(narrow[n]);
      return;
    case DType::kBFloat16:
      for (int64_t n = 0; n < count; ++n) out[n] = BFloat16ToFloat(narrow[n]);
      return;
    case DType::kFloat32:
      std::memcpy(out, static_cast<const float*>(data) + index,
                  static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kFloat64:
    case DType::kBit:
      for (int64_t n = 0; n < count; ++n) out[n] = LoadElement(data, dtype, index + n);
      return;
  }
}

// The same in double.
inline void LoadElements(const void* data, DType dtype, int64_t index, int64_t count, double* out) {
  const uint16_t* const narrow = static_cast<const uint16_t*>(data) + index;
  switch (dtype) {
    case DType::kFloat16:
      for (int64_t n = 0; n < count; ++n) out[n] = static_cast<double>(HalfToFloat(narrow[n]));
      return;
    case DType::kBFloat16:
      for (int64_t n = 0; n < count; ++n) out[n] = static_cast<double>(BFloat16ToFloat(narrow[n]));
      return;
    case DType::kFloat32:
      std::copy_n(static_cast<const float*>(data) + index, count, out);
      return;
    case DType::kFloat64:
      std::copy_n(static_cast<const double*>(data) + index, count, out);
      return;
    case DType::kBit:
      for (int64_t n = 0; n < count; ++n) out[n] = LoadElementAsDouble(data, dtype, index + n);
      return;
  }
}

// Stores `value` as element `index` of an array of `dtype`, rounded once.
inline void StoreElement(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = FloatToHalf(value);
      return;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = FloatToBFloat16(value);
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = value;
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = static_cast<double>(value);
      return;
    case DType::kBit:
      return;  // bits are never written
  }
}

}  // namespace attend
