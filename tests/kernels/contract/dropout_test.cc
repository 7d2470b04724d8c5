// SPDX-License-Identifier: Apache-2.0
//
// The weights that dropout removes: the published bits, their order in a group, the fraction that
// is dropped, and that parts of an attention drop the same weights as the whole.

#include "kernels/contract/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/attention_slice.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

using Words = std::array<uint32_t, 4>;

// Philox4x32 as in the paper (Salmon et al. 2011, section 3.3), in terms of its S-boxes: a 128-bit
// block is two Feistel pairs (L, R), B_k(L) = mulhi(R, M) ^ key ^ L, R' = mullo(R, M), and the two
// R are swapped in every round. Products are made of 16-bit halves.
struct Pair {
  uint32_t left, right;
};

Pair SBox(const Pair& in, uint32_t multiplier, uint32_t key) {
  const uint32_t a = multiplier >> 16, b = multiplier & 0xffff;
  const uint32_t c = in.right >> 16, d = in.right & 0xffff;
  const uint32_t low = b * d, middle = b * c + (low >> 16);  // at most 2^32 - 2^16
  const uint32_t other = a * d + (middle & 0xffff);
  return {(a * c + (middle >> 16) + (other >> 16)) ^ key ^ in.left, in.right * multiplier};
}

Words PaperPhilox(const Words& counter, uint64_t key, int rounds) {
  Words block = counter;
  for (uint32_t round = 0; round < static_cast<uint32_t>(rounds); ++round) {
    const auto bumped = [&](uint64_t word, uint32_t by) {
      return static_cast<uint32_t>(word) + round * by;
    };
    const Pair first = SBox({block[1], block[2]}, 0xCD9E8D57, bumped(key, 0x9E3779B9));
    const Pair second = SBox({block[3], block[0]}, 0xD2511F53, bumped(key >> 32, 0xBB67AE85));
    block = {first.left, first.right, second.left, second.right};
  }
  return block;
}

Words Philox(const Words& counter, uint64_t key) {
  const DropoutBits bits = DropoutPhilox(key, counter[0], counter[1], counter[2], counter[3]);
  return {bits.words[0], bits.words[1], bits.words[2], bits.words[3]};
}

// The known answers of Random123 (kat_vectors), and the same code with ten rounds.
TEST(DropoutPhilox, KnownAnswers) {
  constexpr Words kZeros{}, kOnes{~0u, ~0u, ~0u, ~0u};
  EXPECT_EQ(Philox(kZeros, 0), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(Philox(kOnes, ~uint64_t{0}), (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(PaperPhilox(kZeros, 0, 10), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr Words kPi{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  EXPECT_EQ(PaperPhilox(kPi, 0x299f31d0a4093822, 10),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(DropoutPhilox, MatchesThePapersDefinition) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  const auto word = [&random] {
    const auto bits = static_cast<uint32_t>(random());
    return random() % 4 == 0 ? bits >> 28 : bits;  // small counters are the most common
  };
  for (int n = 0; n < 20000; ++n) {
    const Words counter{word(), word(), word(), word()};
    const uint64_t key = random();
    ASSERT_EQ(Philox(counter, key), PaperPhilox(counter, key, kDropoutRounds))
        << "ATTEND_TEST_SEED=" << seed << " n " << n;
  }
}

// One call's bits, weight by weight: rows i and i + 8 by keys j, j + 1, j + 8 and j + 9.
TEST(Dropout, OneCallServesEightWeights) {
  constexpr uint64_t kSeed = 0x123456789abcdef0;
  for (const int64_t i : {0, 5, 16, 39, 1 << 20}) {
    for (const int64_t j : {0, 2, 6, 16, 100, 1 << 29}) {
      const auto row = static_cast<uint32_t>(i / 16 * 8 + i % 8);
      const auto key = static_cast<uint32_t>(j / 16 * 4 + j % 8 / 2);
      const Words words = PaperPhilox({row, key, 77, 3}, kSeed, kDropoutRounds);
      const int64_t first = i / 16 * 16 + i % 8, left = j / 16 * 16 + j % 8;
      for (size_t n = 0; n < 8; ++n) {
        const int64_t at_row = first + (n < 4 ? 0 : 8);
        const int64_t at_key = left + (n % 4 < 2 ? 0 : 8) + static_cast<int64_t>(n % 2);
        const uint32_t word = words[n / 2];
        const auto draw = static_cast<int32_t>(n % 2 == 0 ? word & 0xffff : word >> 16);
        EXPECT_TRUE(DropoutKeeps(draw, kSeed, 3, 77, at_row, at_key)) << at_row << " " << at_key;
        EXPECT_FALSE(DropoutKeeps(draw + 1, kSeed, 3, 77, at_row, at_key));
      }
    }
  }
}

TEST(DropoutSteps, RoundsToTheNearestStep) {
  const auto steps = [](double p) { return DropoutSteps("dropout_p", p).value(); };
  EXPECT_EQ(steps(0.0), 0);
  EXPECT_EQ(steps(-0.0), 0);
  EXPECT_EQ(steps(0.1), 6554);
  EXPECT_EQ(steps(0.5), 32768);
  EXPECT_EQ(steps(1e-9), 0);
  EXPECT_EQ(steps(0x1.8p-17), 1);
  EXPECT_EQ(steps(0x1p-16), 1);
  EXPECT_EQ(steps(1 - 0x1p-16), 65535);
  EXPECT_EQ(steps(std::nextafter(1 - 0x1p-17, 0)), 65535);
  for (int32_t n = 0; n < kDropoutOne; ++n) {
    ASSERT_EQ(steps(static_cast<double>(n) / kDropoutOne), n);
  }
}

TEST(DropoutSteps, RefusesValuesOutsideZeroToOne) {
  for (const double p :
       {1 - 0x1p-17, 1.0, 1.5, -0x1p-40, -1.0, std::nan(""),
        std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    const Status status = DropoutSteps("dropout_p", p).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << p;
    for (const char* part : {"dropout_p", "[0, 1 - 2^-17)"}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
}

TEST(DropoutScale, IsOneOverTheKeptFraction) {
  EXPECT_EQ(DropoutScale(0), 1.0f);
  EXPECT_EQ(DropoutScale(32768), 2.0f);
  EXPECT_EQ(DropoutScale(65535), 65536.0f);
  EXPECT_EQ(DropoutScale(16384), static_cast<float>(4.0 / 3));
}

// Bound on the deviation of a sum of n independent bits of probability p, exceeded in one case in
// 10^12: by Bernstein's inequality, P(|X - n p| >= t) <= 2 exp(-t^2 / (2 (n p (1 - p) + t / 3))).
double Deviation(double n, double p) {
  const double log = std::log(2e12);
  return log / 3 + std::sqrt(log * log / 9 + 2 * log * n * p * (1 - p));
}

constexpr int64_t kSide = 1024;  // rows and keys of a sample

// Whether each weight of a sample is dropped, in the sample's own numbering.
class Sample {
 public:
  Sample(int32_t dropout, uint64_t seed, int64_t sequence, int64_t head) : p_(dropout / 65536.0) {
    dropped_.reserve(kSide * kSide);
    for (int64_t i = 0; i < kSide; ++i) {
      for (int64_t j = 0; j < kSide; ++j) {
        dropped_.push_back(!DropoutKeeps(dropout, seed, sequence, head, i, j));
      }
    }
  }
  bool operator()(int64_t i, int64_t j) const {
    return dropped_[static_cast<size_t>(i * kSide + j)];
  }
  double p() const { return p_; }

 private:
  const double p_;
  std::vector<bool> dropped_;
};

TEST(Dropout, TheDroppedFractionIsRightEverywhere) {
  const uint64_t seed = FreshSeed();
  for (const int32_t dropout : {1, 64, 6554, 32768, 65000, 65535}) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + std::to_string(dropout));
    const Sample sample(dropout, seed, 5, 9);
    // All, and by row and key in a tile.
    double all = 0;
    std::array<double, 256> places{};
    std::array<double, kSide> rows{}, keys{};
    for (int64_t i = 0; i < kSide; ++i) {
      for (int64_t j = 0; j < kSide; ++j) {
        if (!sample(i, j)) continue;
        ++all;
        ++places[static_cast<size_t>(i % 16 * 16 + j % 16)];
        ++rows[static_cast<size_t>(i)];
        ++keys[static_cast<size_t>(j)];
      }
    }
    const auto expect = [&](double count, double of, const char* what) {
      EXPECT_NEAR(count, of * sample.p(), Deviation(of, sample.p())) << what;
    };
    expect(all, kSide * kSide, "all");
    for (const double count : places) expect(count, kSide * kSide / 256, "a place of the tile");
    for (const double count : rows) expect(count, kSide, "a row");
    for (const double count : keys) expect(count, kSide, "a key");
  }
}

// Neighbours, weights from one call, and the same position in other heads, sequences and seeds.
TEST(Dropout, WeightsAreIndependentOfEachOther) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  constexpr int32_t kDropout = 20000;
  const Sample sample(kDropout, seed, 5, 9);
  const auto expect = [&](const Sample& other, int64_t down, int64_t right, const char* what) {
    double both = 0;
    for (int64_t i = 0; i + down < kSide; ++i) {
      for (int64_t j = 0; j + right < kSide; ++j) {
        both += sample(i, j) && other(i + down, j + right) ? 1 : 0;
      }
    }
    // A pair shares a weight with the one before and the one after it on its line. Every other
    // pair of each line: two sums of independent bits.
    const auto n = static_cast<double>((kSide - down) * (kSide - right));
    const double p = sample.p() * sample.p();
    EXPECT_NEAR(both, n * p, 2 * Deviation(n, p)) << what << " " << down << " " << right;
  };
  for (const auto& [down, right] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {0, 8}, {0, 9}, {8, 0}, {8, 1}, {8, 8}, {8, 9}, {1, 0}, {0, 16}, {16, 0}}) {
    expect(sample, down, right, "places");
  }
  expect(Sample(kDropout, seed, 5, 10), 0, 0, "another head");
  expect(Sample(kDropout, seed, 6, 9), 0, 0, "another sequence");
  expect(Sample(kDropout, seed + 1, 5, 9), 0, 0, "another seed");
  expect(Sample(kDropout, seed + (uint64_t{1} << 32), 5, 9), 0, 0, "the seed's other half");
}

// A higher rate drops the weights that a lower one drops, and more.
TEST(Dropout, RatesAreNested) {
  for (int64_t i = 0; i < 64; ++i) {
    for (int64_t j = 0; j < 64; ++j) {
      EXPECT_TRUE(DropoutKeeps(0, 1, 2, 3, i, j));
      if (DropoutKeeps(40000, 1, 2, 3, i, j)) {
        EXPECT_TRUE(DropoutKeeps(20000, 1, 2, 3, i, j));
      }
    }
  }
}

// By an attention's own row and key, as kernels look it up.
bool Keeps(const Attention& a, int64_t b, int64_t h, int64_t i, int64_t j) {
  const DropoutPlace& place = a.dropout;
  return DropoutKeeps(a.problem.dropout, place.seed, place.sequence + b, place.head + h,
                      place.row + i, a.problem.key_offset + j);
}

TEST(Dropout, ASliceDropsTheSameWeightsAsTheWhole) {
  ProblemSpec spec = MakeSpec(3, 6, 3, 40, 50, 8, 8);
  spec.problem.dropout = 30000;
  spec.dropout = {.seed = FreshSeed(), .sequence = 4, .head = 2, .row = 11};
  const OwnedAttention owned = MakeAttention(spec, 1);
  const AttentionSlice slice{1, 3, 1, 2, 13, 37};
  const Attention part = TakeSlice(owned.attention, slice).value();
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 24; ++i) {
        for (int64_t j = 0; j < 50; ++j) {
          ASSERT_EQ(Keeps(part, b, h, i, j), Keeps(owned.attention, b + 1, h + 2, i + 13, j));
        }
      }
    }
  }
}

TEST(Check, DropoutOfOneOrWithPagesIsRefused) {
  Problem p = MakeSpec(2, 4, 2, 5, 6, 8, 8).problem;
  for (const int32_t dropout : {0, 1, 32768, 65535}) {
    p.dropout = dropout;
    EXPECT_TRUE(Check(p).ok()) << dropout;
  }
  for (const int32_t dropout : {-1, 65536, INT32_MIN, INT32_MAX}) {
    p.dropout = dropout;
    const Status status = Check(p);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << dropout;
    for (const std::string& part :
         {std::string("dropout"), std::to_string(dropout), std::string("[0, 65535]")}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
  }
}

}  // namespace
}  // namespace attend::test
