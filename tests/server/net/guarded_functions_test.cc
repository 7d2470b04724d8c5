// SPDX-License-Identifier: Apache-2.0

#include "server/net/guarded_functions.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

namespace attend {
namespace {

TEST(GuardedFunctions, TheLibrariesHaveThem) {
  EXPECT_NE(grpc::Version(), "");  // or the linker leaves its library out
  const Status status = CheckFunctions(kGuardedFunctions);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

TEST(GuardedFunctions, OneThatIsNotThereIsNamed) {
  constexpr const char* kNames[] = {"SSL_new", "SSL_knew", "SSL_read"};
  const Status status = CheckFunctions(kNames);
  EXPECT_EQ(status.code(), Code::kUnimplemented);
  EXPECT_EQ(status.message().find("no library that was loaded has the function SSL_knew,"), 0U);
}

}  // namespace
}  // namespace attend
