// SPDX-License-Identifier: Apache-2.0
//
// fp16 and bf16 conversions against the arithmetic definition of the formats, exhaustively.

#include "kernels/contract/dtype.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/reference/store_rounded.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  DType dtype;
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kFormats[] = {{DType::kFloat16, 5, 10}, {DType::kBFloat16, 8, 7}};

// The value of a bit pattern: (-1)^s * 1.m * 2^(e - bias), subnormals 0.m * 2^(1 - bias).
double Meaning(const Format& format, uint32_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
  const int exponent =
      static_cast<int>(bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
  if (exponent == (1 << format.exponent_bits) - 1) {
    if (mantissa != 0) return std::numeric_limits<double>::quiet_NaN();
    return sign * static_cast<double>(kInfinity);
  }
  const double fraction = std::ldexp(static_cast<double>(mantissa), -format.mantissa_bits);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, exponent - bias);
}

// Large enough for a double: the compiler cannot know that the dtype is never a wide one here.
uint16_t Stored(DType dtype, float value) {
  alignas(double) uint16_t bits[4] = {0xdead, 0xbeef, 0xbeef, 0xbeef};
  StoreElement(bits, dtype, 0, value);
  EXPECT_EQ(bits[1], 0xbeef);
  return bits[0];
}

float Loaded(DType dtype, uint16_t bits) {
  alignas(double) const uint16_t array[4] = {bits, 0, 0, 0};
  return LoadElement(array, dtype, 0);
}

TEST(DType, NoOtherNumberIsADType) {
  for (int32_t number = -1; number < 8; ++number) {
    EXPECT_EQ(IsDType(number), number >= 1 && number <= 3) << number;
  }
  EXPECT_FALSE(IsDType(static_cast<int32_t>(DType::kFloat64)));  // only inside the process
}

TEST(DType, BitsAreReadFromTheLowestOn) {
  const uint8_t bits[] = {0b00000010, 0b10000001};
  float row[16] = {};
  LoadElements(bits, DType::kBit, 0, 16, row);
  for (int n = 0; n < 16; ++n) {
    const bool kept = n == 1 || n == 8 || n == 15;
    EXPECT_EQ(row[n], kept ? 0.0f : -std::numeric_limits<float>::infinity()) << n;
    EXPECT_EQ(LoadElement(bits, DType::kBit, n), row[n]) << n;
  }
  EXPECT_EQ(RowBytes(DType::kBit, 0), 0);
  EXPECT_EQ(RowBytes(DType::kBit, 1), 1);
  EXPECT_EQ(RowBytes(DType::kBit, 8), 1);
  EXPECT_EQ(RowBytes(DType::kBit, 9), 2);
  EXPECT_EQ(RowBytes(DType::kFloat16, 9), 18);
}

TEST(DType, BitsMayBeginBeforeTheFirstByte) {
  const uint8_t bytes[] = {0b00000010, 0b10000001, 0b00000100};
  const uint8_t* const bits = bytes + 2;
  for (int n = -16; n < 8; ++n) {
    const bool kept = n == -15 || n == -8 || n == -1 || n == 2;
    EXPECT_EQ(LoadElement(bits, DType::kBit, n), kept ? 0.0f : -kInfinity) << n;
  }
}

TEST(DType, EveryPatternWidensToItsValue) {
  for (const Format& format : kFormats) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const uint16_t pattern = static_cast<uint16_t>(bits);
      const double meaning = Meaning(format, bits);
      const float value = Loaded(format.dtype, pattern);
      if (std::isnan(meaning)) {
        ASSERT_TRUE(std::isnan(value)) << DTypeName(format.dtype) << " " << bits;
      } else {
        ASSERT_EQ(static_cast<double>(value), meaning) << DTypeName(format.dtype) << " " << bits;
        ASSERT_EQ(std::signbit(value), (bits & 0x8000u) != 0);
      }
    }
  }
}

TEST(DType, EveryPatternSurvivesTheRoundTrip) {
  for (const Format& format : kFormats) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const uint16_t pattern = static_cast<uint16_t>(bits);
      const float value = Loaded(format.dtype, pattern);
      const uint16_t back = Stored(format.dtype, value);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(Loaded(format.dtype, back))) << bits;
      } else {
        ASSERT_EQ(back, pattern) << DTypeName(format.dtype);
      }
    }
  }
}

// Between two neighbours: nearest wins, the middle goes to the even pattern, also where the upper
// neighbour is Inf and between subnormals.
TEST(DType, RoundsToNearestTiesToEven) {
  for (const Format& format : kFormats) {
    const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
    for (uint32_t bits = 0; bits < infinity; ++bits) {
      const double low = Meaning(format, bits);
      // The next pattern's value if the format had no Inf.
      const double high =
          bits + 1 == infinity ? 2 * low - Meaning(format, bits - 1) : Meaning(format, bits + 1);
      const float middle = static_cast<float>((low + high) / 2);  // exact: one more bit than either
      if (static_cast<double>(middle) != (low + high) / 2) continue;  // below float's subnormals
      const uint16_t even = static_cast<uint16_t>((bits & 1u) == 0 ? bits : bits + 1);
      ASSERT_EQ(Stored(format.dtype, middle), even) << DTypeName(format.dtype) << " " << bits;
      ASSERT_EQ(Stored(format.dtype, -middle), even | 0x8000u);
      ASSERT_EQ(Stored(format.dtype, std::nextafter(middle, 0.0f)), bits);
      ASSERT_EQ(Stored(format.dtype, std::nextafter(middle, kInfinity)), bits + 1);
    }
  }
}

TEST(DType, RandomFloatsRoundToTheNearest) {
  const uint64_t seed = test::FreshSeed();
  uint64_t state = seed;
  for (int n = 0; n < 1000000; ++n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float value = std::bit_cast<float>(static_cast<uint32_t>(state >> 32));
    if (std::isnan(value)) continue;
    for (const Format& format : kFormats) {
      const uint16_t got = Stored(format.dtype, value);
      const double error = std::abs(Meaning(format, got) - static_cast<double>(value));
      const uint32_t magnitude = got & 0x7fffu;
      const uint32_t sign = got & 0x8000u;
      if (!std::isfinite(error)) continue;  // overflow: the test of ties covers the border
      for (const uint32_t other : {magnitude - 1, magnitude + 1}) {
        if (other > 0x7fffu || std::isinf(Meaning(format, other))) continue;
        ASSERT_LE(error, std::abs(Meaning(format, other | sign) - static_cast<double>(value)))
            << "ATTEND_TEST_SEED=" << seed << " value " << value;
      }
    }
  }
}

TEST(DType, NanStaysNanAndOverflowBecomesInf) {
  for (const Format& format : kFormats) {
    // Payload bits only below those that the narrow mantissa keeps: must not become Inf.
    for (const uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffffffffu}) {
      const uint16_t got = Stored(format.dtype, std::bit_cast<float>(bits));
      EXPECT_TRUE(std::isnan(Loaded(format.dtype, got))) << bits;
    }
    const uint16_t big = Stored(format.dtype, std::numeric_limits<float>::max());
    EXPECT_EQ(Loaded(format.dtype, big), kInfinity);
    const uint16_t low = Stored(format.dtype, -kInfinity);
    EXPECT_EQ(Loaded(format.dtype, low), -kInfinity);
  }
}

TEST(DType, UnitRoundoffIsHalfAnUlpOfOne) {
  for (const Format& format : kFormats) {
    EXPECT_EQ(UnitRoundoff(format.dtype), std::ldexp(0.5, -format.mantissa_bits));
    EXPECT_EQ(DTypeBytes(format.dtype), 2);
  }
  EXPECT_EQ(UnitRoundoff(DType::kFloat32),
            static_cast<double>(std::numeric_limits<float>::epsilon()) / 2);
  EXPECT_EQ(DTypeBytes(DType::kFloat32), 4);
}

TEST(DType, Float32IsStoredUnchanged) {
  float array[3] = {1, 2, 3};
  StoreElement(array, DType::kFloat32, 1, 0x1.234567p-140f);
  EXPECT_EQ(LoadElement(array, DType::kFloat32, 1), 0x1.234567p-140f);
  EXPECT_EQ(array[0], 1);
  EXPECT_EQ(array[2], 3);
}

TEST(DType, Float64IsStoredUnchangedAndRoundedForFloats) {
  double array[3] = {1, 2, 3};
  StoreRounded(array, DType::kFloat64, 1, 0x1.23456789abcdep-1000);
  EXPECT_EQ(LoadElementAsDouble(array, DType::kFloat64, 1), 0x1.23456789abcdep-1000);
  EXPECT_EQ(array[0], 1);
  EXPECT_EQ(array[2], 3);
  array[1] = 1 + 0x1p-24 + 0x1p-50;
  EXPECT_EQ(LoadElement(array, DType::kFloat64, 1), 1 + 0x1p-23f);
  StoreElement(array, DType::kFloat64, 0, 0.1f);
  EXPECT_EQ(array[0], static_cast<double>(0.1f));
  EXPECT_EQ(UnitRoundoff(DType::kFloat64), std::numeric_limits<double>::epsilon() / 2);
  EXPECT_EQ(DTypeBytes(DType::kFloat64), 8);
}

TEST(DType, ElementsInDoubleEqualThoseInFloat) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    alignas(double) std::byte memory[8 * 8];
    for (int64_t n = 0; n < 8; ++n) {
      StoreElement(memory, dtype, n, std::ldexp(1.5f, static_cast<int>(n) - 4));
    }
    std::array<float, 5> floats{};
    std::array<double, 5> doubles{};
    LoadElements(memory, dtype, 2, 5, floats.data());
    LoadElements(memory, dtype, 2, 5, doubles.data());
    for (size_t n = 0; n < floats.size(); ++n) {
      EXPECT_EQ(floats[n], std::ldexp(1.5f, static_cast<int>(n) - 2));
      EXPECT_EQ(doubles[n], static_cast<double>(floats[n]));
      EXPECT_EQ(LoadElementAsDouble(memory, dtype, static_cast<int64_t>(n) + 2), doubles[n]);
    }
  }
}

}  // namespace
}  // namespace attend
