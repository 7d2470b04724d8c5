// SPDX-License-Identifier: Apache-2.0
//
// cpu_flash over K and V in pages, and over parts of a sequence's keys.

#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/softmax_state.h"
#include "kernels/cpu/flash.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cpu_targets.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void Flash(const OwnedAttention& owned) {
  const Attention* batch[] = {&owned.attention};
  CpuFlash(batch);
}

std::vector<std::byte> BitsAlone(OwnedAttention* owned) {
  owned->ResetOutput();
  Flash(*owned);
  return owned->OutputBytes();
}

TEST(CpuFlashPages, PagesGiveTheSameBits) {
  const uint64_t seed = FreshSeed();
  const uint64_t count = static_cast<uint64_t>(400 * TestScale());
  constexpr int64_t kPageRows[] = {16, 32, 64, 128};
  ForEachTarget([&] {
    for (uint64_t n = 0; n < count && !testing::Test::HasFailure(); ++n) {
      ProblemSpec spec = RandomSpec(seed + n);
      if (n % 5 == 1) spec = WithDropout(std::move(spec), seed + n);
      ProblemSpec paged = InPages(spec, kPageRows[n % 4]);
      if (n % 3 == 0) paged.page_order = PageOrder::kDescending;
      SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(paged));
      OwnedAttention dense = MakeAttention(spec, seed + n);
      OwnedAttention in_pages = MakeAttention(paged, seed + n);
      EXPECT_EQ(BitsAlone(&in_pages), BitsAlone(&dense));
      const RowsReport report = CheckAllRows(in_pages.attention);
      EXPECT_TRUE(report.ok) << report.detail;
      EXPECT_TRUE(in_pages.GuardsIntact()) << "wrote outside its rows";
    }
  });
}

// Every row of fp32 answers over two parts of its keys.
void MergeInto(OwnedAttention* whole, const Attention& first, const Attention& second) {
  const Attention& a = whole->attention;
  const Problem& p = a.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.len_q; ++i) {
        const int64_t lse = b * a.lse_stride_b + h * a.lse_stride_h + i;
        SoftmaxState<float> state{first.lse[lse], first.lse[lse] == -kInfinity ? 0.0f : 1.0f};
        const MergeWeights<float> weights =
            Merge(state, {second.lse[lse], second.lse[lse] == -kInfinity ? 0.0f : 1.0f});
        a.lse[lse] = LogSumExp(state);
        const int64_t row = b * a.o.stride_b + h * a.o.stride_h + i * a.o.stride_l;
        for (int64_t d = 0; d < p.dim_v; ++d) {
          const float o = weights.left * static_cast<const float*>(first.o.data)[row + d] +
                          weights.right * static_cast<const float*>(second.o.data)[row + d];
          static_cast<float*>(a.o.data)[row + d] = o * InverseSum(state);
        }
      }
    }
  }
}

// Partial answers over parts of the keys, merged, are the answer over all of them.
TEST(CpuFlashPages, PartsOfTheKeysMerge) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < static_cast<uint64_t>(200 * TestScale()); ++n) {
    ProblemSpec spec = RandomSpec(seed + n);
    Problem& p = spec.problem;
    if (p.packed || p.len_k < 2 || !spec.kv_lengths.empty() || p.has_bias) continue;
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    p.dtype = DType::kFloat32;
    p.return_lse = true;
    OwnedAttention whole = MakeAttention(spec, seed + n);
    OwnedAttention first = MakeAttention(spec, seed + n);
    OwnedAttention second = MakeAttention(spec, seed + n);
    const int64_t cut = 1 + static_cast<int64_t>(n) % (p.len_k - 1);
    first.attention.problem.len_k = cut;
    first.attention.problem.keys_after += p.len_k - cut;
    Attention& rest = second.attention;
    rest.problem.len_k -= cut;
    rest.problem.key_offset += cut;
    rest.problem.has_sinks = false;
    for (ConstTensorView* view : {&rest.k, &rest.v}) {
      view->data = static_cast<const float*>(view->data) + cut * view->stride_l;
    }
    for (const OwnedAttention* each : {&first, &second}) Flash(*each);
    MergeInto(&whole, first.attention, second.attention);
    const RowsReport report = CheckAllRows(whole.attention);
    EXPECT_TRUE(report.ok) << report.detail;
  }
}

}  // namespace
}  // namespace attend::test
