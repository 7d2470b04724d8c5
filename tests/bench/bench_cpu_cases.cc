// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/bench_cpu_cases.h"

#include <limits>

namespace attend::bench {
namespace {

std::string ShortName(DType dtype) {
  if (dtype == DType::kFloat32) return "fp32";
  return dtype == DType::kFloat16 ? "fp16" : "bf16";
}

}  // namespace

Case Plain(int64_t b, int64_t h, int64_t length, int64_t d, DType dtype, bool causal,
           bool backward) {
  test::ProblemSpec spec = test::MakeSpec(b, h, h, length, length, d, d, dtype);
  if (causal) spec.problem.mask.right = 0;
  spec.problem.return_lse = backward;
  std::string name = ShortName(dtype) + (backward ? " backward" : "");
  if (b > 1 || h != 8) name += " B" + std::to_string(b) + " H" + std::to_string(h);
  name += " L" + std::to_string(length) + " D" + std::to_string(d) + (causal ? " causal" : "");
  return {name, spec, backward};
}

namespace {

// One new row per head. K and V, 128 MiB, exceed the caches.
Case Decoding(int64_t group, int64_t dim, DType dtype) {
  const int64_t keys = (int64_t{64} << 20) / (8 * dim * DTypeBytes(dtype));
  test::ProblemSpec spec = test::MakeSpec(1, 8 * group, 8, 1, keys, dim, dim, dtype);
  spec.problem.mask.right = 0;
  spec.problem.return_lse = false;
  return {ShortName(dtype) + " decode H" + std::to_string(8 * group) + "/8 Lk" +
              std::to_string(keys) + " D" + std::to_string(dim),
          spec, false, true};
}

// Cases that PyTorch does not support.
void AddOwn(std::vector<Case>* cases) {
  const auto add = [cases](const char* name, const test::ProblemSpec& spec) {
    Case one{name, spec, false, false, false};
    one.spec.problem.return_lse = false;
    cases->push_back(one);
  };
  test::ProblemSpec blhd = test::MakeSpec(1, 8, 8, 2048, 2048, 128, 128);
  blhd.layout = test::Layout::kBLHD;
  add("fp32 L2048 D128 BLHD", blhd);
  add("fp32 L2048 D256", test::MakeSpec(1, 4, 4, 2048, 2048, 256, 256));
  add("fp32 L1000 D80 GQA 4", test::MakeSpec(1, 8, 2, 1000, 1000, 80, 80));
  test::ProblemSpec bias = test::MakeSpec(1, 8, 8, 1024, 1024, 64, 64);
  bias.problem.has_bias = true;
  add("fp32 L1024 D64 bias", bias);
  test::ProblemSpec softcap = test::MakeSpec(1, 8, 8, 1024, 1024, 64, 64);
  softcap.problem.softcap = 50;
  add("fp32 L1024 D64 softcap", softcap);
}

}  // namespace

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool backward : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      cases.push_back(Plain(1, 8, 512, 64, dtype, false, backward));
      cases.push_back(Plain(1, 8, 512, 128, dtype, false, backward));
      cases.push_back(Plain(1, 8, 2048, 64, dtype, false, backward));
      cases.push_back(Plain(1, 8, 2048, 128, dtype, false, backward));
      cases.push_back(Plain(1, 8, 4096, 128, dtype, true, backward));
      if (dtype == DType::kFloat32) continue;
      cases.push_back(Plain(4, 16, 2048, 128, dtype, true, backward));
    }
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t dim : {64, 128}) {
      for (const int64_t group : {1, 8}) cases.push_back(Decoding(group, dim, dtype));
    }
  }
  // A decoding step of one sequence, as a server runs it for each token.
  test::ProblemSpec step = test::MakeSpec(1, 8, 2, 1, 128, 64, 64, DType::kBFloat16);
  step.problem.return_lse = false;
  cases.push_back({"bf16 decode H8/2 Lk128 D64", step});
  cases.push_back(Plain(1, 1, 16, 64, DType::kFloat32));
  cases.push_back(Plain(1, 1, 128, 64, DType::kFloat32));
  cases.push_back(Plain(64, 8, 64, 64, DType::kFloat32));
  AddOwn(&cases);
  return cases;
}

std::vector<Case> SpoiltCases() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<Case> plain;
  for (const bool backward : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const int64_t length : {512, 1024, 2048, 4096}) {
        for (const int64_t dim : {64, 128}) {
          for (const bool causal : {false, true}) {
            plain.push_back(Plain(1, 8, length, dim, dtype, causal, backward));
          }
        }
      }
    }
  }
  for (const int64_t dim : {64, 128}) plain.push_back(Decoding(8, dim, DType::kBFloat16));
  std::vector<Case> cases;
  for (const Case& one : plain) {
    const auto add = [&](const char* name, char tensor, float value) {
      cases.push_back({one.name + name, one.spec, one.backward, false, false, tensor, value});
    };
    add(" NaN in V", 'v', kNan);
    add(" Inf in V", 'v', kInfinity);
    add(" NaN in K", 'k', kNan);
  }
  return cases;
}

}  // namespace attend::bench
