// SPDX-License-Identifier: Apache-2.0
//
// main() of the tests that need a GPU: 77 ("skipped" to CTest) where there is none.

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "kernels/contract/backend.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::string why;
  if (attend::CudaDeviceCount(&why) == 0) {
    std::printf("skipped: %s\n", why.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
