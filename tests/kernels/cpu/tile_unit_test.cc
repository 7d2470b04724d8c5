// SPDX-License-Identifier: Apache-2.0
//
// The tile unit's twin, and where the machine has AMX, its tiles against the twin bit for bit.

#include "kernels/cpu/tile_unit.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/support/problems.h"
#include "tests/kernels/support/tile_twin.h"

namespace attend::test {
namespace {

// Random words, or words whose exponents are near each other.
std::vector<uint16_t> Words(size_t count, bool any, std::mt19937_64* engine) {
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) {
    const auto bits = static_cast<uint16_t>((*engine)());
    word = any ? bits : static_cast<uint16_t>((bits & 0x83ff) | 0x3c00);
  }
  return words;
}

TEST(TileUnit, TheMachinesTilesAgreeWithTheTwin) {
  if (!cpu_flash::WhyNoAmx().empty()) GTEST_SKIP() << cpu_flash::WhyNoAmx();
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 engine(seed);
  const cpu_flash::TileUnit& unit = cpu_flash::MachineTileUnit();
  for (int n = 0; n < 3000; ++n) {
    const int columns = 1 + n % 2;
    const int64_t steps = 1 + n % 8, a_words = 32 * steps + n % 3 * 32;
    const std::vector<uint16_t> a = Words(static_cast<size_t>(32 * a_words), n % 4 < 2, &engine);
    const std::vector<uint16_t> b =
        Words(static_cast<size_t>(steps * 32 * columns * 16), n % 4 < 2, &engine);
    std::vector<float> got(static_cast<size_t>(32 * columns * 16)), wanted(got.size());
    unit.begin();
    unit.multiply(a.data(), a_words * 2, b.data(), steps, columns, got.data());
    unit.end();
    TwinTileUnit().multiply(a.data(), a_words * 2, b.data(), steps, columns, wanted.data());
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(wanted[i])) {
        ASSERT_TRUE(std::isnan(got[i])) << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(wanted[i])) << i;
      }
    }
  }
}

TEST(TileUnit, TheTwinAddsAsTheManualSays) {
  if (!TwinRuns()) GTEST_SKIP() << "no FMA";
  // 1 + 2^-24 at even places: in one chain it would be lost each time, in two chains and a sum it
  // counts with the other chain's.
  uint16_t a[32 * 32] = {}, b[32 * 16] = {};
  const auto word = [](float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); };
  a[0] = a[1] = a[2] = a[3] = word(1);
  b[0] = word(1);              // pair 0, column 0: even
  b[1] = word(0x1p-24f);       // odd
  b[32] = word(0x1p-24f);      // pair 1, even: lost beside 1
  b[32 + 1] = word(0x1p-24f);  // odd: 2^-23 with the first
  float c[32 * 16];
  TwinTileUnit().multiply(a, 64, b, 1, 1, c);
  EXPECT_EQ(c[0], 1 + 0x1p-23f);
  a[1] = a[2] = a[3] = 0;
  b[0] = word(0x1p-127f);
  TwinTileUnit().multiply(a, 64, b, 1, 1, c);
  EXPECT_EQ(c[0], 0) << "a subnormal factor";
  a[0] = word(0x1p-70f), b[0] = word(0x1p-70f);
  TwinTileUnit().multiply(a, 64, b, 1, 1, c);
  EXPECT_EQ(c[0], 0) << "a subnormal product";
}

TEST(TileUnit, GivesTheReasonIfThereIsNone) {
  using cpu_flash::AmxFacts;
  const auto expect = [](const AmxFacts& facts, const char* why, const char* text) {
    EXPECT_NE(cpu_flash::WhyNoAmx(facts).find(why), std::string_view::npos);
    EXPECT_NE(cpu_flash::AmxText(facts).find(text), std::string::npos) << text;
  };
  expect(AmxFacts(), "needs a CPU with AMX", "");
  EXPECT_EQ(cpu_flash::AmxText(AmxFacts()), "");
  expect({.cpu = true}, "without AVX-512", "(cpu_flash runs without AVX-512");
  expect({.cpu = true, .vectors = true}, "XCR0", "(the system does not save AMX tiles");
  expect({.cpu = true, .vectors = true, .state = true}, "ARCH_REQ_XCOMP_PERM",
         "(the system refused AMX tile data");
  const AmxFacts all{.cpu = true, .vectors = true, .state = true, .permitted = true};
  EXPECT_EQ(cpu_flash::WhyNoAmx(all), "");
  EXPECT_EQ(cpu_flash::AmxText(all), ", AMX");
}

}  // namespace
}  // namespace attend::test
