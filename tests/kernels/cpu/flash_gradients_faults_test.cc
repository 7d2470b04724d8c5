// SPDX-License-Identifier: Apache-2.0
//
// The judge of the backward pass (check_gradients.h) detects faults.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/flash.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// The check is only useful if it detects realistic faults. Each fault is in an answer that
// otherwise equals the reference's.
class FaultTest : public ::testing::TestWithParam<DType> {
 protected:
  FaultTest() {
    ProblemSpec spec = MakeSpec(1, 2, 1, 60, 130, 32, 32, GetParam());
    spec.problem.softcap = 5;
    spec.problem.has_bias = spec.problem.has_sinks = true;
    owned_ = MakeAttention(spec, seed_);
    const Attention* batch[] = {&owned_.attention};
    CpuFlash(batch);
  }

  // The reference's answer for another attention and loss, every part of which must fail.
  void ExpectSeen(const Attention& other, const Gradients& loss, bool sinks = true) {
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed_));
    const Attention& a = owned_.attention;
    OwnedGradients answer(a, seed_);
    const GradientsJudge judge(a, answer.get());
    Gradients faulty = answer.get();
    CpuReferenceGradients(a, faulty);
    EXPECT_EQ(judge.Fault(faulty), "") << "without the fault";
    faulty.d_o = loss.d_o;
    faulty.d_lse = loss.d_lse;
    CpuReferenceGradients(other, faulty);
    const auto seen = [&](auto member) {
      Gradients one = faulty;
      for (TensorView* view : {&one.d_q, &one.d_k, &one.d_v, &one.d_bias}) view->data = nullptr;
      one.d_sinks = nullptr;
      one.*member = faulty.*member;
      return judge.Fault(one) != "";
    };
    EXPECT_TRUE(seen(&Gradients::d_q));
    EXPECT_TRUE(seen(&Gradients::d_k));
    EXPECT_TRUE(seen(&Gradients::d_bias));
    if (sinks) {
      EXPECT_TRUE(seen(&Gradients::d_sinks));
    }
  }

  const uint64_t seed_ = FreshSeed();
  OwnedAttention owned_;
};

// A sink's gradient need not show it: rounding O to 16 bits may have as large an effect.
TEST_P(FaultTest, ALostLastKeyIsDetected) {
  Attention other = owned_.attention;
  const int64_t keys = 129;
  other.kv_lengths = &keys;
  ExpectSeen(other, OwnedGradients(owned_.attention, seed_).get(), false);
}

TEST_P(FaultTest, AWrongSignOfDLseIsDetected) {
  OwnedGradients loss(owned_.attention, seed_);
  for (int64_t n = 0; n < 2 * 60; ++n) {
    float& x = const_cast<float*>(loss.get().d_lse)[n];
    x = -x;
  }
  ExpectSeen(owned_.attention, loss.get());
}

// It enters as delta - dLSE, so a neighbour's delta amounts to another dLSE.
TEST_P(FaultTest, TheDeltaOfAnotherRowIsDetected) {
  OwnedGradients loss(owned_.attention, seed_);
  const Attention& a = owned_.attention;
  const auto delta = [&](int64_t n) {
    double sum = 0;
    for (int64_t d = 32 * n; d < 32 * (n + 1); ++d) {
      sum += static_cast<double>(LoadElement(loss.get().d_o.data, GetParam(), d)) *
             static_cast<double>(LoadElement(a.o.data, GetParam(), d));
    }
    return sum;
  };
  for (int64_t n = 1; n < 2 * 60; ++n) {
    const_cast<float*>(loss.get().d_lse)[n] += static_cast<float>(delta(n) - delta(n - 1));
  }
  ExpectSeen(a, loss.get());
}

// In dQ of one row, at scores of order 1.
TEST_P(FaultTest, AMissingSlopeOfSoftcapIsDetected) {
  const Attention& a = owned_.attention;
  OwnedGradients answer(a, seed_);
  const GradientsJudge judge(a, answer.get());
  Gradients g = answer.get();
  CpuReferenceGradients(a, g);
  std::vector<double> d_q(32);
  for (const KeyGradient& key : ReferenceKeyGradients(a, g, {0, 0, 7})) {
    for (int64_t d = 0; d < 32; ++d) {
      const float k = LoadElement(a.k.data, GetParam(), key.j * a.k.stride_l + d);
      d_q[static_cast<size_t>(d)] +=
          static_cast<double>(a.problem.scale) * key.d_score * static_cast<double>(k);
    }
  }
  for (int64_t d = 0; d < 32; ++d) {
    StoreElement(g.d_q.data, GetParam(), 7 * g.d_q.stride_l + d,
                 static_cast<float>(d_q[static_cast<size_t>(d)]));
  }
  EXPECT_NE(judge.Fault(g), "") << "ATTEND_TEST_SEED=" << seed_;
}

INSTANTIATE_TEST_SUITE_P(DTypes, FaultTest, ::testing::ValuesIn(kDTypes),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

}  // namespace
}  // namespace attend::test
