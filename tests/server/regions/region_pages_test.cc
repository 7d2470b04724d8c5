// SPDX-License-Identifier: Apache-2.0
//
// Pages of ended regions that a client still maps.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <memory>
#include <utility>

#include "tests/server/support/await.h"
#include "tests/server/support/region_client.h"
#include "tests/server/support/region_socket_fixture.h"

namespace attend {
namespace {

using test::RegionClient;
using RegionPagesTest = test::RegionSocketFixture;

// Sends the same request, reading no reply, until the server ends the connection.
bool SendUntilEnded(RegionClient& client, const v1::RegionRequest& request,
                    const RegionRegistry& registry) {
  bool sent = true;
  const bool ended = test::Await("the server ends the connection", [&] {
    if (registry.stats().clients == 0) return true;
    sent = client.Send(request.SerializeAsString());
    return !sent;
  });
  return ended && sent;
}

// A client that keeps a mapping of a region it has given up cannot hold memory that is no longer
// counted.
TEST_F(RegionPagesTest, RegionsThatAClientGivesUpAreEmptied) {
  const auto blocks = [](const auto& region) {
    struct stat about {};
    return fstat(region->file(), &about) == 0 ? about.st_blocks : -1;
  };
  ASSERT_TRUE(Start().ok());
  RegionClient client(options_.path);
  const auto released = client.Create(8192), used = client.Create(8192), left = client.Create(8192);
  for (const auto* each : {&released, &used, &left}) (*each)->data()[0] = 'a';
  RegionRef request = registry_.Find(used->token(), 0);
  ASSERT_TRUE(client.Release(released->token()).has_released());
  ASSERT_TRUE(client.Release(used->token()).has_released());
  test::Await("the first region is emptied",
              [&] { return registry_.stats().changing_bytes <= 8192; });
  EXPECT_EQ(blocks(released), 0);
  EXPECT_EQ(released->data()[0], 0);
  EXPECT_EQ(request->data[0], 'a') << "what a request uses is its own until that ends";
  request.reset();
  ASSERT_TRUE(client.Send("\xff\xff\xff"));  // malformed: ends the connection
  WaitUntilEmpty();
  EXPECT_TRUE(blocks(used) == 0 && blocks(left) == 0);
  RegionClient leaving(options_.path);
  const auto behind = leaving.Create(8192);
  leaving.Close();
  WaitUntilEmpty();
  EXPECT_EQ(blocks(behind), 0);
}

// The server ends a connection whose client does not read replies. Its regions may hold an answer.
TEST_F(RegionPagesTest, RegionsOfAnEndedConnectionKeepTheirBytesUntilGivenUp) {
  ASSERT_TRUE(Start().ok());
  RegionClient client(options_.path);
  const auto released = client.Create(8192), left = client.Create(8192);
  for (const auto* each : {&released, &left}) (*each)->data()[0] = 'a';
  v1::RegionRequest request;
  request.mutable_release()->set_token("none");
  ASSERT_TRUE(SendUntilEnded(client, request, registry_));
  EXPECT_EQ(registry_.Find(left->token(), 0), nullptr);
  EXPECT_TRUE(released->data()[0] == 'a' && left->data()[0] == 'a');
  WaitUntilHeld(16384);
  request.mutable_release()->set_token(released->token());
  ASSERT_TRUE(client.Send(request.SerializeAsString()));
  WaitUntilHeld(8192);
  EXPECT_TRUE(released->data()[0] == 0 && left->data()[0] == 'a');
  while (const auto reply = client.Receive()) EXPECT_TRUE(reply->has_error());
  client.Close();
  WaitUntilEmpty();
  EXPECT_EQ(left->data()[0], 0);
}

TEST_F(RegionPagesTest, ARegionWhoseReplyIsNotDeliveredIsNotKept) {
  RegionRegistry registry({{1}, 1 << 30, 1 << 30, 1 << 20}, memory_, clock_, RandomToken);
  Result<std::unique_ptr<RegionSocket>> socket =
      RegionSocket::Start(options_, registry, logger_, clock_);
  ASSERT_TRUE(socket.ok());
  RegionClient client(options_.path);
  client.Create(1);
  v1::RegionRequest request;
  request.mutable_create()->set_bytes(1);
  ASSERT_TRUE(SendUntilEnded(client, request, registry));
  int64_t heard_of = 1;
  while (client.Receive()) ++heard_of;
  test::Await("the last region is emptied", [&] { return registry.stats().changing_bytes == 0; });
  EXPECT_EQ(registry.stats().bytes, heard_of * 4096);
  EXPECT_EQ(registry.stats().created, heard_of + 1);
}

}  // namespace
}  // namespace attend
