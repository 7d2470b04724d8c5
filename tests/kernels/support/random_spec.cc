// SPDX-License-Identifier: Apache-2.0
//
// Draws the specs of the random sweep: every feature with every other.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <random>
#include <utility>

#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr int64_t kDims[] = {1, 2, 3, 7, 31, 32, 33, 64, 80, 96, 127, 128, 129, 192, 255, 256};
constexpr int64_t kLengths[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 300};

class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}

  int64_t Range(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>(0, 1)(engine_) < probability;
  }
  template <class Values>
  auto Pick(const Values& values) {
    return values[Range(0, std::ssize(values) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

// Lengths are kept and the rest shrinks, so that long rows occur too.
void Shrink(Problem* p, double work_max) {
  const auto work = [p] {
    return static_cast<double>(p->batch * p->heads_q * p->len_q) *
           static_cast<double>(p->len_k * (p->dim + p->dim_v));
  };
  while (work() > work_max && p->batch > 1) --p->batch;
  while (work() > work_max && p->heads_kv > 1) {
    const int64_t group = p->group();
    p->heads_kv = 1;
    p->heads_q = group;
  }
  while (work() > work_max && p->len_q > 1) p->len_q = (p->len_q + 1) / 2;
  while (work() > work_max && p->len_k > 1) p->len_k = (p->len_k + 1) / 2;
}

Mask DrawMask(Draw* draw, const Problem& p) {
  Mask mask;
  mask.alignment = draw->Chance(0.5) ? Alignment::kBottomRight : Alignment::kTopLeft;
  if (draw->Chance(0.6)) mask.right = draw->Chance(0.6) ? 0 : draw->Range(0, p.len_k + 3);
  if (draw->Chance(0.4)) mask.left = draw->Range(0, draw->Chance(0.5) ? 20 : p.len_k + 3);
  if (draw->Chance(0.03)) mask.right = INT64_MAX;
  if (draw->Chance(0.03)) mask.left = INT64_MAX;
  return mask;
}

void DrawLengths(Draw* draw, ProblemSpec* spec) {
  Problem& p = spec->problem;
  p.packed = draw->Chance(0.25);
  const bool q = p.packed || draw->Chance(0.3);
  const bool kv = p.packed || draw->Chance(0.3);
  const auto length = [draw](int64_t most) {
    if (draw->Chance(0.15)) return int64_t{0};  // an empty sequence
    return draw->Chance(0.2) ? most : draw->Range(0, most);
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    if (q) spec->q_lengths.push_back(length(p.len_q));
    if (kv) spec->kv_lengths.push_back(length(p.len_k));
  }
}

void DrawFeatures(Draw* draw, ProblemSpec* spec) {
  Problem& p = spec->problem;
  p.mask = DrawMask(draw, p);
  if (draw->Chance(0.25)) p.softcap = draw->Chance(0.5) ? 5.0f : 50.0f;
  p.has_bias = draw->Chance(0.3);
  p.has_alibi = draw->Chance(0.25);
  p.has_sinks = draw->Chance(0.25);
  p.return_lse = draw->Chance(0.7);
  if (draw->Chance(0.2)) p.scale = draw->Chance(0.5) ? 1.0f : -0.3f;
  spec->bias_per_sequence = draw->Chance(0.5);
  spec->bias_per_head = draw->Chance(0.5);
  spec->bias_per_query = draw->Chance(0.7);
  constexpr DType kBiasDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kBit};
  spec->bias_dtype = draw->Pick(kBiasDTypes);
  spec->bias_masked_share = draw->Chance(0.5) ? 0.3 : (draw->Chance(0.2) ? 1.0 : 0.0);
  spec->alibi_per_sequence = draw->Chance(0.5);
  spec->misaligned_elements = draw->Chance(0.5) ? 0 : draw->Range(1, 7);
  if (draw->Chance(0.15)) spec->magnitude_q = 300;  // sharp: one key takes all the weight
  p.o_float32 = draw->Chance(0.2);
}

}  // namespace

ProblemSpec RandomSpec(uint64_t seed, double work_max) {
  Draw draw(seed);
  const int64_t heads_kv = draw.Range(1, 3);
  const int64_t group = draw.Range(1, 8);
  const int64_t dim = draw.Pick(kDims);
  const int64_t dim_v = draw.Chance(0.5) ? dim : draw.Pick(kDims);
  ProblemSpec spec =
      MakeSpec(draw.Range(0, 9) == 0 ? 0 : draw.Range(1, 4), heads_kv * group, heads_kv,
               draw.Pick(kLengths), draw.Pick(kLengths), dim, dim_v, draw.Pick(kDTypes));
  Shrink(&spec.problem, work_max);
  constexpr Layout kLayouts[] = {Layout::kBHLD, Layout::kBLHD, Layout::kStrided};
  spec.layout = draw.Pick(kLayouts);
  DrawLengths(&draw, &spec);
  DrawFeatures(&draw, &spec);
  return spec;
}

ProblemSpec RandomKernelSpec(uint64_t seed, double work_max) {
  ProblemSpec spec = RandomSpec(seed, work_max);
  Draw draw(~seed);
  if (draw.Chance(0.5)) spec = InPages(std::move(spec), int64_t{16} << draw.Range(0, 4));
  constexpr PageOrder kOrders[] = {PageOrder::kShuffled, PageOrder::kDescending,
                                   PageOrder::kShared};
  spec.page_order = draw.Pick(kOrders);
  if (draw.Chance(0.2)) spec.problem.key_offset = draw.Range(1, 200);
  if (draw.Chance(0.2)) spec.problem.keys_after = draw.Range(1, 200);
  return spec;
}

ProblemSpec InPages(ProblemSpec spec, int64_t page_rows) {
  spec.problem.page_rows = spec.problem.packed ? 0 : page_rows;
  return spec;
}

ProblemSpec WithDropout(ProblemSpec spec, uint64_t seed) {
  Draw draw(seed ^ 0xd209u);
  constexpr int32_t kRates[] = {1, 655, 6554, 13107, 32768, 52429, 65535};
  spec.problem.dropout =
      draw.Chance(0.5) ? static_cast<int32_t>(draw.Range(1, 65535)) : draw.Pick(kRates);
  const auto place = [&draw](int64_t most) {
    return draw.Chance(0.4) ? int64_t{0} : draw.Range(0, draw.Chance(0.8) ? 100 : most);
  };
  spec.dropout = {.seed = static_cast<uint64_t>(draw.Range(INT64_MIN, INT64_MAX)),
                  .sequence = place(int64_t{1} << 20),
                  .head = place(int64_t{1} << 16),
                  .row = place(int64_t{1} << 30)};
  return spec;
}

std::string Describe(const ProblemSpec& spec) {
  std::string text = attend::Describe(spec.problem);
  constexpr const char* kLayoutNames[] = {" BHLD", " BLHD", " strided"};
  text += spec.problem.packed ? " LHD" : kLayoutNames[static_cast<int>(spec.layout)];
  const auto add = [&text](const char* name, const std::vector<int64_t>& lengths) {
    if (lengths.empty()) return;
    text += std::string(" ") + name + "=";
    for (const int64_t length : lengths) text += std::to_string(length) + ",";
  };
  add("q_lengths", spec.q_lengths);
  add("kv_lengths", spec.kv_lengths);
  if (spec.problem.has_bias) {
    text += std::string(" bias[") + (spec.bias_per_sequence ? "B" : "1") +
            (spec.bias_per_head ? "H" : "1") + (spec.bias_per_query ? "Q" : "1") + "] " +
            std::string(DTypeName(spec.bias_dtype));
    text += " masked " + std::to_string(spec.bias_masked_share);
  }
  if (spec.alibi_per_sequence) text += " alibi[B]";
  constexpr const char* kOrderNames[] = {" shuffled", " descending", " shared"};
  if (spec.problem.page_rows > 0) text += kOrderNames[static_cast<int>(spec.page_order)];
  if (spec.problem.dropout > 0) {
    text += " dropout seed " + std::to_string(spec.dropout.seed) + " at sequence " +
            std::to_string(spec.dropout.sequence) + " head " + std::to_string(spec.dropout.head) +
            " row " + std::to_string(spec.dropout.row);
  }
  text += " misaligned " + std::to_string(spec.misaligned_elements);
  text += " magnitude " + std::to_string(spec.magnitude_q);
  return text;
}

double TestScale() {
  if (const char* scale = std::getenv("ATTEND_TEST_SCALE")) return std::strtod(scale, nullptr);
  return ATTEND_TEST_DEFAULT_SCALE;
}

}  // namespace attend::test
