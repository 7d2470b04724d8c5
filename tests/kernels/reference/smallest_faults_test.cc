// SPDX-License-Identifier: Apache-2.0
//
// The smallest faults that the check detects in answers of the CPU kernels.

#include "tests/kernels/support/smallest_faults.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"

namespace attend::test {
namespace {

bool Flash(OwnedAttention* owned) {
  const Attention* batch[] = {&owned->attention};
  CpuFlash(batch);
  return true;
}
bool FlashGradients(OwnedAttention* owned, OwnedGradients* gradients) {
  CpuFlashGradients(owned->attention, gradients->get());
  return true;
}
bool Reference(OwnedAttention* owned) {
  CpuReference(owned->attention);
  return true;
}
bool ReferenceGradients(OwnedAttention* owned, OwnedGradients* gradients) {
  CpuReferenceGradients(owned->attention, gradients->get());
  return true;
}

// Both are also checked as kernels that round weights.
const JudgedKernel kKernels[] = {{true, true, Flash, FlashGradients},
                                 {true, true, Reference, ReferenceGradients}};

class SmallestFaults : public ::testing::TestWithParam<size_t> {};

TEST_P(SmallestFaults, MatchTheTable) { ExpectSmallestFault(GetParam(), kKernels); }

INSTANTIATE_TEST_SUITE_P(Faults, SmallestFaults, ::testing::Range(size_t{0}, CountSmallestFaults()),
                         [](const auto& info) { return "Fault" + std::to_string(info.param); });

TEST(SmallestFaults, DISABLED_Measure) { PrintSmallestFaults(kKernels); }

}  // namespace
}  // namespace attend::test
