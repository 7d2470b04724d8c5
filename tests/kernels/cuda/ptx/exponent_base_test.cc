// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of the CUDA tile kernels between scores and outputs, run on the host: the kernels'
// own functions (exponent_base.cuh), called in their order by a model of one row. What differs from
// the device is exp2, here the library's with small results flushed, and who holds which score.

#include "kernels/cuda/ptx/exponent_base.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/contract/dtype.h"
#include "kernels/contract/limits.h"
#include "tests/kernels/support/problems.h"

namespace attend::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr double kRoundoff = UnitRoundoff(DType::kFloat32);

enum class Kernel { kFp32, kSm80, kSm90 };

// The arithmetic of one kernel: scores are q.k in multiples of `unit` (a scale that is applied
// later, or 1).
struct Way {
  Kernel kernel;
  DType dtype;  // of weights
  int tile;     // keys
  float unit = 1.0f;
  bool has_sink = false;
  float sink = 0.0f;

  std::string Name() const {
    constexpr const char* kNames[] = {"fp32", "sm80", "sm90"};
    return std::string(kNames[static_cast<int>(kernel)]) + " " + std::string(DTypeName(dtype)) +
           " tile " + std::to_string(tile) + " unit " + std::to_string(unit);
  }
};

struct Row {
  float o = 0;
  float lse = 0;
};

float Rounded(DType dtype, float weight) {
  uint32_t bits = 0;
  StoreElement(&bits, dtype, 0, weight);
  return LoadElement(&bits, dtype, 0);
}

// The value that the kernels vote on: the largest of 0 and the scores, as integers.
float HighestAsInteger(const std::vector<float>& scores) {
  int32_t highest = 0;
  for (const float score : scores) highest = std::max(highest, std::bit_cast<int32_t>(score));
  return std::bit_cast<float>(highest);
}

float Largest(const std::vector<float>& scores, bool keep_nan) {
  float top = -kInfinity;
  for (const float score : scores) {
    top = keep_nan && (std::isnan(score) || std::isnan(top)) ? kNan : std::fmax(top, score);
  }
  return top;
}

// cuda_flash_fp32: keys from the first to the last, the maximum followed exactly.
Row RunFp32(const Way& way, const std::vector<float>& scores, const std::vector<float>& values) {
  const float to_log2 = static_cast<float>(1.4426950408889634 * static_cast<double>(way.unit));
  float max = -kInfinity, sum = 0, o = 0;
  for (size_t begin = 0; begin < scores.size(); begin += static_cast<size_t>(way.tile)) {
    const size_t end = std::min(scores.size(), begin + static_cast<size_t>(way.tile));
    const std::vector<float> tile(scores.begin() + begin, scores.begin() + end);
    const float next = std::fmax(max, Largest(tile, false));
    const float reference = ReferenceOf(next);
    const float rescale = WeightAgainst(max, reference, to_log2);
    max = next;
    sum *= rescale;
    o *= rescale;
    for (size_t n = begin; n < end; ++n) {
      if (scores[n] == -kInfinity) continue;
      const float weight = WeightAgainst(scores[n], reference, to_log2);
      sum += weight;
      o += weight * values[n];
    }
  }
  SoftmaxState<float> state;
  if (max != -kInfinity) state.max = max * way.unit;
  state.sum = sum;
  return {o * OutputFactor(state, 1.0f, way.has_sink, way.sink), LogSumExp(state)};
}

// As redo_rows.cuh does.
Way BySixteens(Way way) {
  way.tile = 16;
  return way;
}

// cuda_flash_sm80 with a bias or ALiBi, and _sm90: keys from the last tile to the first, bases that
// follow lazily.
Row RunTensorCores(const Way& way, const std::vector<float>& scores,
                   const std::vector<float>& values) {
  const bool sm90 = way.kernel == Kernel::kSm90;
  const float to_log2 = RoundedProduct(way.unit, kLog2E);
  float base = kNoBase, reference = 0, sum = 0, o = 0;
  const auto width = static_cast<size_t>(way.tile);
  for (size_t begin = scores.size() / width * width + width; begin > 0;) {
    begin -= width;
    if (begin >= scores.size()) continue;
    const size_t end = std::min(scores.size(), begin + width);
    std::vector<float> tile(scores.begin() + begin, scores.begin() + end);
    const float highest = HighestAsInteger(tile);
    if (sm90 ? MayRaiseSm90(highest, base, to_log2) : Outgrows(highest, base, to_log2)) {
      const float top = Largest(tile, sm90);
      if (sm90) {
        if (RaisesSm90(top, base, to_log2)) {
          const float risen = NearOrMarkedBase(top, to_log2);
          const float rescale = FastExp2(base - risen);
          base = risen;
          sum *= rescale;
          o *= rescale;
        }
      } else if (RaisesSm80(top, base, reference, to_log2)) {
        const RaisedBase raised = RaiseBase(top, base, reference, to_log2);
        base = raised.base;
        reference = raised.reference;
        sum *= raised.rescale;
        o *= raised.rescale;
      }
      if (IsFar(base) && !sm90) {
        for (float& score : tile) score = FarScore(score, reference);
      }
    }
    for (size_t n = begin; n < end; ++n) {
      const float weight = Weight(tile[n - begin], to_log2, base);
      sum += weight;
      if (tile[n - begin] == -kInfinity) continue;
      o += Rounded(way.dtype, weight) * values[n];
    }
  }
  if (sm90 && base == kMarkedBase) return RunFp32(BySixteens(way), scores, values);
  const FinishedRow row = FinishBase(base, reference, sum, to_log2);
  SoftmaxState<float> state = row.state;
  return {o * OutputFactor(state, row.unit, way.has_sink, way.sink), LogSumExp(state)};
}

Row Run(const Way& way, const std::vector<float>& scores, const std::vector<float>& values) {
  return way.kernel == Kernel::kFp32 ? RunFp32(way, scores, values)
                                     : RunTensorCores(way, scores, values);
}

std::vector<Way> Ways() {
  std::vector<Way> ways;
  for (const float unit : {1.0f, 0.125f, kLateScaleMin, kLateScaleMax}) {
    for (const int tile : {32, 64}) ways.push_back({Kernel::kFp32, DType::kFloat32, tile, unit});
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const int tile : {48, 64, 96, 128}) {
        ways.push_back({Kernel::kSm80, dtype, tile, unit});
        ways.push_back({Kernel::kSm90, dtype, tile, unit});
      }
    }
  }
  return ways;
}

// The same in double, with a bound on what the roundings may cost: of each difference of scores, of
// exp2, of the weight and of sums one by one.
void Expect(const Way& way, const std::vector<float>& scores, const std::vector<float>& values) {
  const Row got = Run(way, scores, values);
  const double unit = static_cast<double>(way.unit);
  double max = -HUGE_VAL;
  bool nan = false;
  for (const float score : scores) {
    nan = nan || !(score < kInfinity);
    max = std::max(max, static_cast<double>(score) * unit);
  }
  if (max == -HUGE_VAL && !nan) {  // no key
    EXPECT_EQ(got.o, 0.0f);
    const float lse = way.has_sink ? way.sink : -kInfinity;
    EXPECT_TRUE(lse < kInfinity ? got.lse == lse : std::isnan(got.lse)) << got.lse;
    return;
  }
  nan = nan || (way.has_sink && !(way.sink < kInfinity));
  if (!nan && std::abs(max) > static_cast<double>(kMost)) return;  // beyond fp32
  if (nan) {
    EXPECT_TRUE(std::isnan(got.o)) << got.o;
    EXPECT_TRUE(std::isnan(got.lse)) << got.lse;
    return;
  }
  double sum = 0, o = 0, error = 0;
  const auto count = static_cast<double>(scores.size());
  for (size_t n = 0; n < scores.size(); ++n) {
    if (scores[n] == -kInfinity) continue;
    const double x = static_cast<double>(scores[n]) * unit - max;
    const double weight = std::exp(x);
    const double v = static_cast<double>(values[n]);
    sum += weight;
    o += weight * v;
    // fp16 loses weights below 2^-24 of the largest, in steps of 2^-25; rows may lag by 2^8.
    const double lost = way.dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-110;
    error += (weight * (2 * UnitRoundoff(way.dtype) + kRoundoff * (64 + count - 8 * x)) + lost) *
             std::abs(v);
  }
  const double sink = way.has_sink ? std::exp(static_cast<double>(way.sink) - max) : 0;
  if (!std::isfinite(sink)) return;  // the row counts as empty
  EXPECT_NEAR(static_cast<double>(got.o), o / (sum + sink), error / (sum + sink));
  const double lse = max + std::log(sum + sink);
  if (std::abs(lse) < static_cast<double>(kMost) || max == -static_cast<double>(kMost)) {
    EXPECT_NEAR(static_cast<double>(got.lse), lse, kRoundoff * (32 + count + 4 * std::abs(lse)));
  }
}

std::vector<float> Normal(size_t count, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(*random);
  return values;
}

class ExponentBase : public testing::Test {
 protected:
  const uint64_t seed_ = test::FreshSeed();
  std::mt19937_64 random_{seed_};

  void ExpectAll(const std::vector<float>& scores) {
    const std::vector<float> values = Normal(scores.size(), &random_);
    for (Way way : Ways()) {
      for (const float sink : {0.0f, 2.0f, -3e38f, -kInfinity, kInfinity, kNan}) {
        way.has_sink = sink != 0;
        way.sink = sink;
        SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_) + " " + way.Name());
        Expect(way, scores, values);
      }
    }
  }
};

constexpr float kMasks[] = {-1e4f,      -1e9f, -1e10f, -1e20f, -2.5e38f, -kMost,
                            -kInfinity, 1e9f,  1e10f,  3e38f,  kMost};
constexpr size_t kPads[] = {1, 63, 64, 65, 128, 200};

TEST_F(ExponentBase, FullyMaskedRowsAreRight) {
  for (const float mask : kMasks) {
    for (const size_t keys : kPads) {
      SCOPED_TRACE(std::to_string(mask) + " keys " + std::to_string(keys));
      ExpectAll(std::vector<float>(keys, mask));
    }
  }
}

TEST_F(ExponentBase, PaddingOnEitherSideIsRight) {
  for (const float mask : kMasks) {
    for (const size_t pad : kPads) {
      for (const bool left : {true, false}) {
        SCOPED_TRACE(std::to_string(mask) + (left ? " left " : " right ") + std::to_string(pad));
        std::vector<float> scores = Normal(100, &random_);
        scores.insert(left ? scores.begin() : scores.end(), pad, mask);
        ExpectAll(scores);
      }
    }
  }
}

// Far from 0 in either direction, where a float's steps are wider than a weight's range, climbing
// and falling across the border between near rows and far ones.
TEST_F(ExponentBase, ScoresThatRiseAndFallAreRight) {
  for (const float step : {0.3f, 40.0f, 1e5f, 1e9f, 1e36f}) {
    for (const float sign : {1.0f, -1.0f}) {
      for (const float start : {0.0f, -100.0f}) {
        std::vector<float> scores;
        for (int n = 0; n < 300; ++n) {
          scores.push_back(sign * step * (static_cast<float>(n) + start));
        }
        SCOPED_TRACE(std::to_string(sign * step) + " from " + std::to_string(start));
        ExpectAll(scores);
      }
    }
  }
}

TEST_F(ExponentBase, AnOrdinaryBaseIsNotTakenForTheFarMark) {
  for (const Way& way : Ways()) {
    if (way.kernel == Kernel::kFp32) continue;
    const float to_log2 = RoundedProduct(way.unit, kLog2E);
    float score = kFarBase / to_log2;
    for (int n = 0; n < 8 && RoundedProduct(score, to_log2) != kFarBase; ++n) {
      score = std::nextafter(score, n % 2 == 0 ? 0.0f : -kMost);
    }
    EXPECT_FALSE(IsFar(RaiseBase(score, kNoBase, 0, to_log2).base));
    ExpectAll(std::vector<float>(70, score));
  }
}

// Else its value would count as one that the mask hides.
TEST_F(ExponentBase, AFarScoreIsInfiniteOnlyIfTheScoreIs) {
  EXPECT_EQ(FarScore(-kMost, kMost), -kMost);
  EXPECT_EQ(FarScore(-kInfinity, kMost), -kInfinity);
  EXPECT_EQ(FarScore(-1e10f, -1e10f), 0);
  EXPECT_TRUE(std::isnan(FarScore(kNan, -1e10f)));
}

TEST_F(ExponentBase, NanAndInfinityAnywhere) {
  const float specials[] = {std::bit_cast<float>(0x7fc00001u), std::bit_cast<float>(0xffffffffu),
                            std::bit_cast<float>(0xff800001u), kInfinity, -kInfinity};
  for (const float special : specials) {
    for (const float rest : {0.5f, -kMost, -1e10f, 3e38f, -kInfinity}) {
      for (const size_t at : {0, 63, 64, 130, 199}) {
        SCOPED_TRACE(std::to_string(special) + " at " + std::to_string(at) + " among " +
                     std::to_string(rest));
        std::vector<float> scores(200, rest);
        scores[at] = special;
        ExpectAll(scores);
      }
    }
  }
}

TEST_F(ExponentBase, RandomBits) {
  for (int n = 0; n < static_cast<int>(300 * test::TestScale()); ++n) {
    std::vector<float> scores = Normal(1 + random_() % 300, &random_);
    const uint64_t gap = 1 + random_() % 64;
    for (size_t at = random_() % gap; at < scores.size(); at += 1 + random_() % gap) {
      scores[at] = std::bit_cast<float>(static_cast<uint32_t>(random_()));
      if (n % 4 != 0 && !std::isfinite(scores[at])) scores[at] = -kMost;
      if (n % 3 != 0) scores[at] = -std::abs(scores[at]);
    }
    ExpectAll(scores);
  }
}

}  // namespace
}  // namespace attend::cuda
