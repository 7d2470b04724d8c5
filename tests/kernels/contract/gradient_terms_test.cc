// SPDX-License-Identifier: Apache-2.0
//
// The backward pass's workspace on a GPU: which passes take turns at dQ, and where its sums are.

#include "kernels/contract/gradient_terms.h"

#include <gtest/gtest.h>

#include <iterator>

#include "kernels/contract/select.h"
#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

Problem Half() { return test::MakeSpec(2, 4, 2, 300, 500, 64, 64, DType::kFloat16).problem; }

DeviceInfo Hopper() {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "cuda:0";
  device.compute_capability = 90;
  device.workspace_bytes_max = 1 << 30;
  return device;
}

TEST(GradientTerms, ProblemsTakeTurnsIfTheWorkspaceFits) {
  const Problem p = Half();
  DeviceInfo gpu = Hopper();
  ASSERT_TRUE(TakesTurns(p));
  const int64_t most = *TurnWorkspaceBytes(p);
  const int64_t least = *GradientTermsBytes(p);
  EXPECT_GE(most, least + 4 * p.batch * p.heads_q * p.len_q * p.dim);
  EXPECT_EQ(SelectBackward(p, gpu)->workspace_bytes, most);
  EXPECT_EQ(SelectBackward(p, gpu, "cuda_flash_fp32")->workspace_bytes, least);
  gpu.workspace_bytes_max = most - 1;
  const Result<Selection> without = SelectBackward(p, gpu);
  ASSERT_TRUE(without.ok());
  EXPECT_EQ(without->kernel, KernelId::kCudaFlashSm90);
  EXPECT_EQ(without->workspace_bytes, least);
}

TEST(GradientTerms, OnlySomeProblemsTakeTurns) {
  void (*const others[])(Problem*) = {
      [](Problem* p) { p->dim = 136; },
      [](Problem* p) { p->dim_v = 136; },
      [](Problem* p) { p->softcap = 30.0f; },
      [](Problem* p) { p->dropout = 655; },
      [](Problem* p) { p->len_q = kTurnBytesMax / kTurnTileBytes * TurnRows(*p); },
      [](Problem* p) { p->len_q = INT64_MAX / 2; },
  };
  for (const auto change : others) {
    Problem p = Half();
    change(&p);
    EXPECT_FALSE(TakesTurns(p)) << Describe(p);
  }
}

// Beyond this bound scores would need a shift, which Hopper's kernels with softcap cannot store.
TEST(GradientTerms, SoftcapOnHopperNeedsScoresWithoutAShift) {
  Problem p = Half();
  p.softcap = 256;
  EXPECT_EQ(SelectBackward(p, Hopper())->kernel, KernelId::kCudaFlashSm90);
  p.softcap = 257;
  EXPECT_EQ(SelectBackward(p, Hopper())->kernel, KernelId::kCudaFlashSm80);
  const Status forced = SelectBackward(p, Hopper(), "cuda_flash_sm90").status();
  EXPECT_EQ(forced.code(), Code::kUnimplemented) << forced.ToString();
}

TEST(GradientTerms, PackedSequencesShareNoTiles) {
  for (const int64_t dim : {64, 128}) {
    Problem p = Half();
    p.packed = true;
    p.dim = p.dim_v = dim;
    const int64_t lengths[] = {1, 0, 127, 128, 129, 64, 0, 0, 1000, 1};
    p.batch = std::size(lengths);
    for (const int64_t length : lengths) p.total_q += length;
    int64_t next = 0;
    Sequence s;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t i = 0; i < lengths[b]; i += TurnRows(p)) {
        const int64_t tile = TurnTile(p, s, b, 0, i);
        EXPECT_GE(tile, next);
        next = tile + 1;
      }
      s.q_row += lengths[b];
    }
    EXPECT_LE(next, TurnTilesOfHead(p));
    EXPECT_EQ(TurnTile(p, Sequence{}, 0, 1, 0), TurnTilesOfHead(p));
  }
}

}  // namespace
}  // namespace attend
