// SPDX-License-Identifier: Apache-2.0
//
// The fault sweep's part for shared regions: the N-th registration of their pages fails, for every
// N.

#include <memory>
#include <string>

#include "tests/server/shared_memory_fixture.h"

namespace attend {
namespace {

using test::RegionClient;

// The system does not let a region's pages be locked: its client is told, nobody else notices.
TEST_F(SharedMemoryTest, TheNthRegistrationFails) {
  constexpr int kRegions = 4;
  const std::string text = "page-locking 123 bytes: cudaErrorPretend";
  Start();
  for (int n = 1; n <= kRegions; ++n) {
    SCOPED_TRACE("region " + std::to_string(n));
    server_->backend().FailRegister(n, ResourceExhausted(text));
    RegionClient client(path());
    std::unique_ptr<test::MappedRegion> region;
    for (int i = 1; i <= kRegions; ++i) {
      if (i != n) {
        region = client.Create(1 << 16);
        continue;
      }
      const v1::RegionReply reply = client.TryCreate(1 << 16);
      EXPECT_EQ(reply.error().code(), static_cast<int>(Code::kResourceExhausted));
      EXPECT_EQ(reply.error().message(), text);
    }
    EXPECT_EQ(stats().regions, kRegions - 1);
    EXPECT_EQ(stats().bytes, (kRegions - 1) << 16);
    test::WireProblem problem = Shared(*region, static_cast<uint64_t>(n));
    v1::AttendResponse response;
    ASSERT_TRUE(Attend(problem.request, &response).ok());
    EXPECT_EQ(test::Judge(problem, test::WithBytes(*region, response)), "");
    client.Close();
    WaitUntilEmpty();
  }
  EXPECT_EQ(stats().refused, kRegions);
}

}  // namespace
}  // namespace attend
