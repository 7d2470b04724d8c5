// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/smallest_faults.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/reference/check_gradients.h"
#include "kernels/reference/check_rows.h"

namespace attend::test {
namespace {

// An answer is judged as one of a kernel that rounds weights, or of one that does not.
struct Column {
  DType dtype;
  bool rounded;
};
// The table's, from left to right.
constexpr Column kColumns[] = {{DType::kFloat32, false},
                               {DType::kFloat16, false},
                               {DType::kBFloat16, false},
                               {DType::kFloat16, true},
                               {DType::kBFloat16, true}};

using Kernels = std::span<const JudgedKernel>;

bool IsIn(const Column& column, const JudgedKernel& kernel) {
  return column.rounded ? kernel.rounded : kernel.unrounded;
}

// One row, computed for `faulty` and judged for the original problem.
bool SeenInRow(Kernels kernels, const Column& column, const ProblemSpec& spec, uint64_t seed,
               const std::function<void(Attention*)>& change,
               const std::function<void(const Attention&)>& spoil = nullptr) {
  for (const JudgedKernel& kernel : kernels) {
    OwnedAttention owned = MakeAttention(spec, seed), faulty = MakeAttention(spec, seed);
    if (!IsIn(column, kernel) || !kernel.run(&owned)) continue;
    Attention judged = owned.attention;
    const RowsReport right = CheckAllRows(judged, column.rounded);
    EXPECT_TRUE(right.ok) << right.detail;
    if (change) change(&faulty.attention);
    EXPECT_TRUE(kernel.run(&faulty));
    judged.o.data = faulty.attention.o.data;
    judged.lse = faulty.attention.lse;
    if (spoil) spoil(judged);
    if (CheckAllRows(judged, column.rounded).ok) return false;
  }
  return true;
}

ProblemSpec RowSpec(const Column& column, int64_t keys, double magnitude_q = 1) {
  ProblemSpec spec = MakeSpec(1, 1, 1, 1, keys, 64, 64, column.dtype);
  spec.magnitude_q = magnitude_q;
  return spec;
}

bool KeysAreLost(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInRow(kernels, column, RowSpec(column, 65536, 0.05), seed,
                   [size](Attention* a) { a->problem.len_k -= static_cast<int64_t>(size); });
}

bool ScaleIsWrong(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInRow(kernels, column, RowSpec(column, 65536), seed,
                   [size](Attention* a) { a->problem.scale *= static_cast<float>(1 + size); });
}

// The largest, by that share of the mean of |V|, which is 0.8: its own rounding is the largest too.
bool ElementIsOff(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInRow(
      kernels, column, RowSpec(column, 1024), seed, nullptr, [size](const Attention& a) {
        const auto o = [&](int64_t d) { return LoadElementAsDouble(a.o.data, a.problem.dtype, d); };
        int64_t at = 0;
        for (int64_t d = 1; d < 64; ++d) at = std::abs(o(d)) > std::abs(o(at)) ? d : at;
        const double off = std::copysign(0.8 * size, o(at));
        StoreElement(a.o.data, a.problem.dtype, at, static_cast<float>(o(at) + off));
      });
}

bool DropoutIsAnother(Kernels kernels, const Column& column, double size, uint64_t seed) {
  ProblemSpec spec = RowSpec(column, 1024);
  spec.problem.dropout = kDropoutOne / 10;
  return SeenInRow(kernels, column, spec, seed,
                   [size](Attention* a) { a->dropout.seed += static_cast<uint64_t>(size); });
}

ProblemSpec GradientsSpec(const Column& column) {
  return MakeSpec(1, 2, 1, 24, 64, 32, 32, column.dtype);
}

// The gradients of `change`'s problem and loss, judged for the original problem. All biases are
// `bias`.
bool SeenInGradients(Kernels kernels, const Column& column, const ProblemSpec& spec, uint64_t seed,
                     const std::function<void(Attention*, Gradients*)>& change, float bias = 0) {
  const auto make = [&] {
    OwnedAttention made = MakeAttention(spec, seed);
    if (spec.problem.has_bias) {
      std::fill_n(static_cast<float*>(const_cast<void*>(made.attention.bias.data)), 48 * 64, bias);
    }
    return made;
  };
  for (const JudgedKernel& kernel : kernels) {
    OwnedAttention owned = make(), faulty = make();
    if (!IsIn(column, kernel) || !kernel.run(&owned)) continue;
    EXPECT_TRUE(kernel.run(&faulty));
    OwnedGradients gradients(owned.attention, seed + 1), other(faulty.attention, seed + 1);
    if (!kernel.run_gradients(&owned, &gradients)) continue;
    const auto check = [&](const Gradients& judged) {
      return CheckGradients(owned.attention, judged, 1, 1e12, nullptr, column.rounded);
    };
    const RowsReport right = check(gradients.get());
    EXPECT_EQ(right.ok, bias == 0) << right.detail;
    EXPECT_FALSE(right.failed()) << right.detail;
    change(&faulty.attention, &other.get());
    if (!kernel.run_gradients(&faulty, &other)) continue;
    Gradients judged = other.get();
    judged.d_o = gradients.get().d_o;
    judged.d_lse = gradients.get().d_lse;
    if (!check(judged).failed()) return false;
  }
  return true;
}

bool ScaleOfGradientsIsWrong(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInGradients(
      kernels, column, GradientsSpec(column), seed,
      [size](Attention* a, Gradients*) { a->problem.scale *= static_cast<float>(1 + size); });
}

// As with a part of the keys, LSE is taken as given.
bool WeightsSumToMore(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInGradients(kernels, column, GradientsSpec(column), seed,
                         [size](Attention* a, Gradients*) {
                           a->problem.keys_after = 1;
                           for (int64_t n = 0; n < 48; ++n)
                             a->lse[n] -= static_cast<float>(std::log1p(size));
                         });
}

// All scores are about -1e9, where LSE in fp32 does not have the logarithm of their number.
bool WeightsSumToTheirNumber(Kernels kernels, const Column& column, double size, uint64_t seed) {
  ProblemSpec spec = GradientsSpec(column);
  spec.problem.has_bias = true;
  return SeenInGradients(
      kernels, column, spec, seed,
      [size](Attention* a, Gradients*) { a->problem.keys_after = static_cast<int64_t>(size); },
      -1e9f);
}

// In roundings of sum |dO||O| to O's dtype.
bool DeltaIsOff(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInGradients(kernels, column, GradientsSpec(column), seed,
                         [&](Attention* a, Gradients* g) {
                           const DType dtype = a->problem.dtype;
                           for (int64_t n = 0; n < 48; ++n) {
                             const int64_t row = n / 24 * a->o.stride_h + n % 24 * a->o.stride_l;
                             double products = 0;
                             for (int64_t d = row; d < row + 32; ++d) {
                               products += std::abs(LoadElementAsDouble(a->o.data, dtype, d) *
                                                    LoadElementAsDouble(g->d_o.data, dtype, d));
                             }
                             float* const d_lse = const_cast<float*>(g->d_lse) + n;
                             *d_lse -= static_cast<float>(size * UnitRoundoff(dtype) * products);
                           }
                         });
}

bool RowOfLossIsLost(Kernels kernels, const Column& column, double size, uint64_t seed) {
  return SeenInGradients(
      kernels, column, GradientsSpec(column), seed, [size](Attention* a, Gradients* g) {
        const DType dtype = a->problem.dtype;
        for (int64_t d = 5 * g->d_o.stride_l; d < 5 * g->d_o.stride_l + 32; ++d) {
          const double x = LoadElementAsDouble(g->d_o.data, dtype, d);
          StoreElement(const_cast<void*>(g->d_o.data), dtype, d,
                       static_cast<float>(x * (1 - size)));
        }
      });
}

bool DropoutOfGradientsIsAnother(Kernels kernels, const Column& column, double size,
                                 uint64_t seed) {
  ProblemSpec spec = GradientsSpec(column);
  spec.problem.dropout = kDropoutOne / 10;
  return SeenInGradients(kernels, column, spec, seed, [size](Attention* a, Gradients*) {
    a->dropout.seed += static_cast<uint64_t>(size);
  });
}

struct Fault {
  const char* name;
  double least;  // there is none smaller, but for none at all
  bool (*seen)(Kernels, const Column&, double size, uint64_t seed);
};
constexpr Fault kFaults[] = {
    {"O, LSE: lost keys of 65,536, scores of 0.05", 1, KeysAreLost},
    {"O, LSE: scale, 65,536 keys", 0, ScaleIsWrong},
    {"O: one element, in means of \\|V\\|, 1,024 keys", 0, ElementIsOff},
    {"O: dropout by another seed", 1, DropoutIsAnother},
    {"gradients: scale", 0, ScaleOfGradientsIsWrong},
    {"gradients: weights sum to more than 1", 0, WeightsSumToMore},
    {"gradients: weights sum to the number of keys, scores of -1e9", 1, WeightsSumToTheirNumber},
    {"gradients: delta, in roundings of O", 0, DeltaIsOff},
    {"gradients: share of a row of dO that is lost, of 48", 0, RowOfLossIsLost},
    {"gradients: dropout by another seed", 1, DropoutOfGradientsIsAnother},
};

// The table's cells behind that name.
std::vector<double> Stated(const std::string& name) {
  std::ifstream file(ATTEND_SMALLEST_FAULTS);
  std::vector<double> cells;
  for (std::string line; std::getline(file, line);) {
    const std::string begin = "| " + name + " |";
    if (line.compare(0, begin.size(), begin) != 0) continue;
    std::istringstream rest(line.substr(begin.size()));
    for (std::string cell; std::getline(rest, cell, '|');) cells.push_back(std::stod(cell));
  }
  return cells;
}

}  // namespace

size_t CountSmallestFaults() { return std::size(kFaults); }

void ExpectSmallestFault(size_t line, std::span<const JudgedKernel> kernels) {
  const Fault& fault = kFaults[line];
  const std::vector<double> stated = Stated(fault.name);
  ASSERT_EQ(stated.size(), std::size(kColumns)) << fault.name;
  const uint64_t seed = FreshSeed();
  for (size_t n = 0; n < stated.size(); ++n) {
    SCOPED_TRACE(std::string(fault.name) + " " + std::string(DTypeName(kColumns[n].dtype)) +
                 (kColumns[n].rounded ? " rounded" : "") +
                 " ATTEND_TEST_SEED=" + std::to_string(seed));
    const auto always_seen = [&](double size, int rounds) {
      bool seen = true;
      for (int each = 0; each < rounds && seen; ++each) {
        seen = fault.seen(kernels, kColumns[n], size, seed + static_cast<uint64_t>(each));
      }
      return seen;
    };
    EXPECT_TRUE(always_seen(stated[n], std::max(1, static_cast<int>(3 * TestScale()))));
    // In fewer rounds, all may show it by chance.
    EXPECT_FALSE(always_seen(stated[n] > fault.least ? stated[n] / 16 : 0, 3));
  }
}

void PrintSmallestFaults(std::span<const JudgedKernel> kernels) {
  for (const Fault& fault : kFaults) {
    std::string row = std::string("| ") + fault.name + " |";
    for (const Column& column : kColumns) {
      double least = fault.least;
      for (double size = 1.0 / (1 << 22); size < 1e4 && least == 0; size *= 2) {
        bool all = true;
        for (uint64_t seed = 1; seed < 9 && all; ++seed)
          all = fault.seen(kernels, column, size, seed);
        if (all) least = size;
      }
      char text[32];
      std::snprintf(text, sizeof text, " %.1g |", least * 1.05);
      row += text;
    }
    std::printf("%s\n", row.c_str());
  }
}

}  // namespace attend::test
