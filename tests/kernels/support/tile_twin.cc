// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/tile_twin.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace attend::test {
namespace {

constexpr int64_t kStep = 32;  // terms that one instruction adds to an element
constexpr int64_t kRows = 32;
constexpr int64_t kTileColumns = 16;

float Flushed(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

float Widened(uint16_t word) { return Flushed(std::bit_cast<float>(uint32_t{word} << 16)); }

// If the compiler has fused multiply-adds for this machine, they are not library calls.
#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
void AddStep(const uint16_t* a, const uint16_t* b, int64_t width, int64_t column, float* c) {
  float even = 0, odd = 0;
  for (int64_t n = 0; n < kStep / 2; ++n) {
    const uint16_t* const pair = b + 2 * (n * width + column);
    even = Flushed(std::fma(Widened(a[2 * n]), Widened(pair[0]), even));
    odd = Flushed(std::fma(Widened(a[2 * n + 1]), Widened(pair[1]), odd));
  }
  *c = Flushed(*c + Flushed(even + odd));
}

void Multiply(const void* a, int64_t a_bytes, const void* b, int64_t steps, int columns, float* c) {
  const int64_t width = columns * kTileColumns;
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      float sum = 0;
      for (int64_t n = 0; n < steps; ++n) {
        uint16_t row[kStep];
        std::memcpy(row, static_cast<const char*>(a) + i * a_bytes + n * 64, sizeof(row));
        AddStep(row, static_cast<const uint16_t*>(b) + n * kStep * width, width, j, &sum);
      }
      c[i * width + j] = sum;
    }
  }
}

void Nothing() {}

constexpr cpu_flash::TileUnit kTwin{Nothing, Nothing, Multiply};

}  // namespace

const cpu_flash::TileUnit& TwinTileUnit() { return kTwin; }

bool TwinRuns() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
#else
  return true;
#endif
}

}  // namespace attend::test
