// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/planted_faults.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "kernels/reference/check_rows.h"
#include "kernels/reference/cpu_reference.h"

namespace attend::test {
namespace {

constexpr int64_t kKeys = 90;
constexpr int64_t kHidden = 70;  // more than a tile of any kernel's keys
constexpr int64_t kDimV = 16;
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// How the keys are hidden.
enum class Hide { kBias, kAlibi, kScores };

struct Case {
  Hide hide;
  float bias;      // of hidden keys
  bool left;       // the first keys are the hidden ones, or the last
  bool whole_row;  // row 0 of sequence 0 and head 0 has that bias throughout
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool left : {false, true}) {
    for (const float bias : {-1e4f, -1e9f, kLowest, -kInfinity}) {
      for (const bool whole_row : {false, true}) {
        cases.push_back({Hide::kBias, bias, left, whole_row});
      }
    }
    cases.push_back({Hide::kScores, 0, left, false});
  }
  cases.push_back({Hide::kAlibi, 0, true, false});
  return cases;
}

std::string Describe(const Case& c) {
  const char* kNames[] = {"bias ", "alibi ", "scores "};
  return kNames[static_cast<int>(c.hide)] + std::to_string(c.bias) + (c.left ? " left" : " right") +
         (c.whole_row ? " and a whole row" : "");
}

float* BiasOf(const OwnedAttention& owned, int64_t b, int64_t h, int64_t i) {
  const BiasView& bias = owned.attention.bias;
  return const_cast<float*>(static_cast<const float*>(bias.data)) + b * bias.stride_b +
         h * bias.stride_h + i * bias.stride_q;
}

bool IsHidden(const Case& c, int64_t j) { return c.left ? j < kHidden : j >= kKeys - kHidden; }

// Keys that point the other way, at scores of -1e6 or (16 bits) the dtype's limit.
void HideByScores(const Case& c, OwnedAttention* owned) {
  const Attention& a = owned->attention;
  for (int64_t b = 0; b < a.problem.batch; ++b) {
    for (int64_t h = 0; h < a.problem.heads_q; ++h) {
      for (int64_t i = 0; i < a.problem.len_q; ++i) Set(a, owned->Q(b, h, i, 0), 2);
    }
    for (int64_t h = 0; h < a.problem.heads_kv; ++h) {
      for (int64_t j = 0; j < kKeys; ++j) {
        Set(a, owned->K(b, h, j, 0), IsHidden(c, j) ? -6e4f : 0);
      }
    }
  }
}

OwnedAttention Make(DType dtype, const Case& c, uint64_t seed) {
  ProblemSpec spec = MakeSpec(2, 2, 1, 5, kKeys, 32, kDimV, dtype);
  Problem& p = spec.problem;
  p.has_bias = c.hide == Hide::kBias;
  p.has_alibi = c.hide == Hide::kAlibi;
  OwnedAttention owned = MakeAttention(spec, seed);
  if (c.hide == Hide::kScores) HideByScores(c, &owned);
  for (int64_t h = 0; h < p.heads_q && p.has_alibi; ++h) {
    const_cast<float*>(owned.attention.alibi_slopes)[h] = 1e7f;
  }
  for (int64_t b = 0; b < p.batch && p.has_bias; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.len_q; ++i) {
        const bool all = c.whole_row && b == 0 && h == 0 && i == 0;
        for (int64_t j = 0; j < kKeys; ++j) {
          BiasOf(owned, b, h, i)[j] = all || IsHidden(c, j) ? c.bias : 0;
        }
      }
    }
  }
  return owned;
}

std::string RowName(const RowId& id) {
  return "of sequence " + std::to_string(id.b) + ", head " + std::to_string(id.h) + ", row " +
         std::to_string(id.i);
}

void ExpectFault(const OwnedAttention& owned, const RowId& id, const std::string& what) {
  const RowsReport report = CheckAllRows(owned.attention);
  EXPECT_FALSE(report.ok) << what << " " << RowName(id) << " passes, bound " << report.bound
                          << ", of LSE " << report.lse_bound;
  EXPECT_NE(report.detail.find(RowName(id)), std::string::npos) << what << ": " << report.detail;
  EXPECT_TRUE(std::isfinite(report.bound) && std::isfinite(report.lse_bound)) << what;
}

void PlantInRow(OwnedAttention* owned, const RowId& id, int64_t d, float lse_fault) {
  const Attention& a = owned->attention;
  std::array<double, kDimV> o;
  double lse = 0;
  RowRounding rounding;
  ReferenceRow(a, id.b, id.h, id.i, o.data(), &lse, &rounding);
  const double share =
      a.problem.dtype == DType::kFloat32 ? 1e-3 : 8 * UnitRoundoff(a.problem.dtype);
  void* const element = owned->O(id.b, id.h, id.i, d);
  const float was = Get(a, element);
  for (const double sign : {1.0, -1.0}) {
    // Rounded away from the right answer.
    const double wrong =
        o[static_cast<size_t>(d)] + sign * share * rounding.o[static_cast<size_t>(d)];
    Set(a, element,
        static_cast<float>(wrong + sign * UnitRoundoff(a.problem.dtype) * std::abs(wrong)));
    ExpectFault(*owned, id, "o[" + std::to_string(d) + "]");
  }
  Set(a, element, was);
  float& stored = a.lse[id.b * a.lse_stride_b + id.h * a.lse_stride_h + id.i];
  const float lse_was = stored;
  for (const float sign : {1.0f, -1.0f}) {
    stored = lse_was + sign * lse_fault;
    ExpectFault(*owned, id, "lse");
  }
  stored = lse_was;
}

}  // namespace

void ExpectPlantedFaultsCaught(DType dtype, const std::function<bool(OwnedAttention*)>& run) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  const auto draw = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (const Case& c : Cases()) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + std::string(DTypeName(dtype)) +
                 " " + Describe(c));
    OwnedAttention owned = Make(dtype, c, seed);
    if (!run(&owned)) continue;
    const RowsReport report = CheckAllRows(owned.attention);
    EXPECT_TRUE(report.ok) << report.detail;
    // At -1e4 fp32 still determines the weights to 0.1 % or so.
    if (c.bias < -1e4f) {
      EXPECT_EQ(report.rows_wide, c.whole_row && std::isfinite(c.bias) ? 1 : 0);
    }
    for (int n = 0; n < 4; ++n) {
      // Under ALiBi row 4 is the one that gives the last key the largest weight.
      PlantInRow(&owned, {draw(2), draw(2), 1 + draw(4)}, draw(kDimV), 1e-4f);
    }
  }
}

void ExpectLongRowFaultsCaught(DType dtype, const std::function<bool(OwnedAttention*)>& run) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> values(0.5f, 1);
  for (const float q : {0.0f, 1.0f}) {
    for (const bool positive : {false, true}) {
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " +
                   std::string(DTypeName(dtype)) + " q " + std::to_string(q) +
                   (positive ? " positive" : ""));
      constexpr int64_t kLong = 131072;
      OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 1, kLong, 1, 2, dtype), seed);
      Set(owned.attention, owned.Q(0, 0, 0, 0), q);
      for (int64_t n = 0; n < 2 * kLong && positive; ++n) {
        Set(owned.attention, owned.V(0, 0, n / 2, n % 2), values(random));
      }
      if (!run(&owned)) continue;
      const RowsReport report = CheckAllRows(owned.attention);
      EXPECT_TRUE(report.ok) << report.detail;
      PlantInRow(&owned, {0, 0, 0}, 1, 1e-3f);
    }
  }
}

void ExpectWideRowsStayInRange(DType dtype, const std::function<bool(OwnedAttention*)>& run) {
  const uint64_t seed = FreshSeed();
  for (const float bias : {-1e9f, kLowest}) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed) + " " + std::string(DTypeName(dtype)) +
                 " " + std::to_string(bias));
    OwnedAttention owned = Make(dtype, {Hide::kBias, bias, true, true}, seed);
    const Attention& a = owned.attention;
    if (!run(&owned)) continue;
    const RowsReport report = CheckAllRows(a);
    EXPECT_TRUE(report.ok) << report.detail;
    EXPECT_EQ(report.rows_wide, 1);
    EXPECT_TRUE(std::isfinite(report.bound) && std::isfinite(report.lse_bound));
    for (const int64_t d : {int64_t{0}, kDimV - 1}) {
      float low = kInfinity, high = -kInfinity;
      for (int64_t j = 0; j < kKeys; ++j) {
        const float v = Get(a, owned.V(0, 0, j, d));
        low = std::min(low, v);
        high = std::max(high, v);
      }
      const float beyond = 0.1f * std::max(-low, high);
      void* const element = owned.O(0, 0, 0, d);
      const float was = Get(a, element);
      for (const float wrong :
           {low - beyond, high + beyond, kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        Set(a, element, wrong);
        ExpectFault(owned, {0, 0, 0}, std::to_string(wrong));
      }
      Set(a, element, was);
    }
  }
}

}  // namespace attend::test
