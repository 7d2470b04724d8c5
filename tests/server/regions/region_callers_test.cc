// SPDX-License-Identifier: Apache-2.0
//
// Connections to the regions' socket: authentication, limits and ends.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "server/limits/tenant_limits.h"
#include "tests/server/support/region_client.h"
#include "tests/server/support/region_socket_fixture.h"

namespace attend {
namespace {

using test::RegionClient;
using RegionCallersTest = test::RegionSocketFixture;

bool Identify(RegionClient& client, const std::string& token, v1::RegionReply* reply = nullptr) {
  v1::RegionRequest request;
  request.mutable_identify()->set_token(token);
  if (!client.Send(request.SerializeAsString())) return false;
  const std::optional<v1::RegionReply> got = client.Receive();
  if (got && reply != nullptr) *reply = *got;
  return got && got->has_identified();
}

// A token is the number of its tenant.
Result<int> TenantOf(const std::string& token, const std::string&) { return std::stoi(token); }

// If callers must identify themselves, connections that do not cannot lock others out.
TEST_F(RegionCallersTest, AnUnidentifiedConnectionMakesRoom) {
  options_.connections_max = 3;
  options_.identify = TenantOf;
  ASSERT_TRUE(Start().ok());
  RegionClient known(options_.path);
  ASSERT_TRUE(Identify(known, "0"));
  RegionClient first(options_.path), second(options_.path), third(options_.path);
  RegionClient fourth(options_.path);
  EXPECT_FALSE(first.Receive()) << "the oldest has made room";
  ASSERT_TRUE(Identify(second, "0"));
  ASSERT_TRUE(Identify(third, "0"));
  v1::RegionReply refused;
  EXPECT_FALSE(Identify(fourth, "0", &refused));
  EXPECT_EQ(refused.error().code(), static_cast<int>(Code::kResourceExhausted));
  EXPECT_EQ(refused.error().message(),
            "the socket has reached its limit of 3 connections; the tenant has 3, its reserved "
            "share is 0");
  EXPECT_NE(known.Create(1), nullptr);
}

// It keeps its place and its regions' contents until its client closes it.
TEST_F(RegionCallersTest, AnEndedConnectionKeepsItsPlaceUntilItsClientClosesIt) {
  std::atomic<bool> known = true;
  std::atomic<uint64_t> generation = 1;
  options_.connections_max = 2;
  options_.identify = [&](const std::string& token, const std::string&) -> Result<int> {
    if (token == "2" && !known) return Status(Code::kPermissionDenied, "no more");
    return 0;
  };
  options_.generation = [&] { return generation.load(); };
  ASSERT_TRUE(Start().ok());
  RegionClient stays(options_.path), goes(options_.path);
  ASSERT_TRUE(Identify(stays, "0"));
  ASSERT_TRUE(Identify(goes, "2"));
  const auto open = stays.Create(1), kept = goes.Create(1);
  kept->data()[0] = 'a';
  known = false;
  ++generation;
  socket_->RecheckAll();
  EXPECT_EQ(goes.Receive()->error().message(), "no more");
  EXPECT_FALSE(goes.Receive());
  RegionClient other(options_.path);
  EXPECT_FALSE(Identify(other, "1"));
  EXPECT_EQ(registry_.Find(kept->token(), 0), nullptr);
  EXPECT_EQ(kept->data()[0], 'a') << "an answer there may not have been read";
  goes.Close();
  WaitUntilHeld(open->bytes());
  EXPECT_EQ(kept->data()[0], 0);
  EXPECT_TRUE(Identify(other, "1"));
  socket_.reset();  // destroyed before the variables it reads
}

TEST_F(RegionCallersTest, ATenantsLimitOnConnectionsIsEnforced) {
  std::vector<TenantBounds> bounds(2);
  bounds[1][Limit::kConnections] = 1;
  TenantLimits limits(bounds, clock_);
  options_.identify = TenantOf;
  options_.tenant_weights = {1, 1};
  options_.limits = &limits;
  ASSERT_TRUE(Start().ok());
  auto first = std::make_unique<RegionClient>(options_.path);
  RegionClient second(options_.path), other(options_.path);
  ASSERT_TRUE(Identify(*first, "1"));
  v1::RegionReply refused;
  EXPECT_FALSE(Identify(second, "1", &refused));
  EXPECT_EQ(refused.error().message(),
            "tenant limit connections: the tenant has 1, may have at most 1");
  ASSERT_TRUE(Identify(other, "0"));
  first.reset();
  WaitForClients(1);
  EXPECT_TRUE(Identify(second, "1"));
  socket_.reset();  // destroyed before the limits it holds
  EXPECT_EQ(limits.use(1, Limit::kConnections).used, 0);
}

TEST_F(RegionCallersTest, AConnectionThatDoesNotIdentifyInTimeIsEnded) {
  std::atomic<int> nobodies = 0;
  options_.on_nobody = [&nobodies] { ++nobodies; };
  options_.identify = [](const std::string&, const std::string&) -> Result<int> { return 0; };
  options_.identify_time = std::chrono::milliseconds(50);
  ASSERT_TRUE(Start().ok());
  RegionClient silent(options_.path);
  EXPECT_NE(silent.Receive()->error().message().find("did not identify itself in time"),
            std::string::npos);
  EXPECT_FALSE(silent.Receive());
  EXPECT_EQ(nobodies, 1);
  socket_.reset();  // destroyed before the counter it increments
}

TEST_F(RegionCallersTest, ARevokedCallersReleaseIsHonoured) {
  std::atomic<bool> known = true;
  std::atomic<uint64_t> generation = 1;
  options_.identify = [&](const std::string&, const std::string&) -> Result<int> {
    if (known) return 0;
    return Status(Code::kPermissionDenied, "no more");
  };
  options_.generation = [&] { return generation.load(); };
  ASSERT_TRUE(Start().ok());
  RegionClient goes(options_.path);
  ASSERT_TRUE(Identify(goes, "1"));
  const auto region = goes.Create(1), other = goes.Create(1);
  known = false;
  ++generation;
  v1::RegionRequest request;
  request.mutable_release()->set_token(region->token());
  ASSERT_TRUE(goes.Send(request.SerializeAsString()));
  EXPECT_EQ(goes.Receive()->error().message(), "no more");
  EXPECT_FALSE(goes.Receive());
  // The revocation may have been seen before the packet.
  for (int n = 0; n < 10'000 && registry_.stats().bytes != other->bytes(); ++n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(registry_.stats().bytes, other->bytes()) << "one was released";
  socket_.reset();
}

// A lender may free memory once the server has closed its imports; the end of the connection is its
// only signal.
class RegionLenderTest : public RegionCallersTest, public ::testing::WithParamInterface<bool> {};

TEST_P(RegionLenderTest, AnEndedConnectionClosesAfterItsImports) {
  std::string bytes(4096, 'a');
  backend_.SetUuid(std::string(kDeviceUuidBytes, 'u'));
  backend_.Lend("handle", {bytes.data(), std::ssize(bytes)});
  const DeviceImporter importer({&backend_});
  RegionRegistry registry({{1}, 1 << 20, 1 << 19, 4}, memory_, clock_, RandomToken, &importer);
  std::atomic<uint64_t> generation = 1;
  options_.identify = [&](const std::string&, const std::string&) -> Result<int> {
    if (generation == 1) return 0;
    return Status(Code::kPermissionDenied, "no more");
  };
  options_.generation = [&] { return generation.load(); };
  auto socket = RegionSocket::Start(options_, registry, logger_, clock_);
  ASSERT_TRUE(socket.ok());
  RegionClient goes(options_.path);
  ASSERT_TRUE(Identify(goes, "1"));
  v1::ImportCudaMemory lent;
  lent.set_device_uuid(std::string(kDeviceUuidBytes, 'u'));
  lent.set_memory_handle("handle");
  lent.set_bytes(bytes.size());
  RegionRef request = registry.Find(goes.Import(lent).imported().token(), 0);
  ASSERT_NE(request, nullptr);
  if (GetParam()) {  // the credential is revoked
    ++generation;
    (*socket)->RecheckAll();
  } else {
    ASSERT_TRUE(goes.Send("\xff"));  // not a request
  }
  EXPECT_TRUE(goes.Receive()->has_error());
  auto left = std::async(std::launch::async, [&] {
    EXPECT_FALSE(goes.Receive());
    return backend_.imported();
  });
  EXPECT_EQ(left.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  request.reset();
  EXPECT_EQ(left.get(), 0) << "the server has closed it";
  while (registry.stats().clients > 0) std::this_thread::yield();
}

INSTANTIATE_TEST_SUITE_P(, RegionLenderTest, ::testing::Bool());

}  // namespace
}  // namespace attend
