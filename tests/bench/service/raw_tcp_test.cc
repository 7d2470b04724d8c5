// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "tests/bench/service/raw_tcp.h"

namespace attend::bench {
namespace {

TEST(TouchBytesTest, AddsTheFirstWordOfEachLine) {
  std::vector<std::byte> data(200, std::byte{0xFF});
  for (const size_t line : {0, 1, 2, 3}) {
    const uint64_t word = line + 1;
    std::memcpy(data.data() + 64 * line, &word, sizeof(word));
  }
  EXPECT_EQ(TouchBytes(data.data(), 200), 1u + 2 + 3 + 4);
  EXPECT_EQ(TouchBytes(data.data(), 199), 1u + 2 + 3);  // the last word is incomplete
  EXPECT_EQ(TouchBytes(data.data(), 192), 1u + 2 + 3);
  EXPECT_EQ(TouchBytes(data.data(), 0), 0u);
}

class RawTcpTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<RawTcpServer>> server = RawTcpServer::Start();
    ASSERT_TRUE(server.ok()) << server.status().ToString();
    server_ = std::move(*server);
  }

  // Drives the load, and requires that the sample has the bytes that the server has counted.
  void Drive(const RawTcpLoad& load, int64_t calls_min) {
    const Result<std::unique_ptr<RawTcpClient>> client =
        RawTcpClient::Connect(server_->address(), load);
    ASSERT_TRUE(client.ok()) << client.status().ToString();
    const int64_t before = server_->bytes_received();
    const Result<Sample> sample = (*client)->Drive(0.02);
    ASSERT_TRUE(sample.ok()) << sample.status().ToString();
    EXPECT_GE(sample->calls, calls_min);
    EXPECT_GT(sample->seconds, 0);
    EXPECT_EQ(sample->bytes, sample->calls * (load.up_bytes + load.down_bytes));
    EXPECT_EQ(server_->bytes_received() - before, sample->calls * load.up_bytes);
    // The connections can be used again.
    EXPECT_TRUE((*client)->Drive(0).ok());
  }

  std::unique_ptr<RawTcpServer> server_;
};

TEST_F(RawTcpTest, OneWay) {
  RawTcpLoad load;
  load.up_bytes = 300001;  // no multiple of anything
  load.connections = 3;
  load.in_flight = 4;
  load.chunk_bytes = 65536;
  Drive(load, 3);
}

TEST_F(RawTcpTest, BothWays) {
  RawTcpLoad load;
  load.up_bytes = 70000;
  load.down_bytes = 200003;
  load.connections = 2;
  load.chunk_bytes = 4096;
  Drive(load, 2);
}

TEST_F(RawTcpTest, OneMessageOverAllConnections) {
  RawTcpLoad load;
  load.up_bytes = 1000003;
  load.down_bytes = 333331;
  load.connections = 8;
  load.together = true;
  load.chunk_bytes = 65536;
  Drive(load, 1);
}

TEST_F(RawTcpTest, RefusesUnsupportedSizes) {
  RawTcpLoad load;
  load.up_bytes = 10;
  load.down_bytes = 10;
  load.in_flight = 2;
  EXPECT_EQ(RawTcpClient::Connect(server_->address(), load).status().code(),
            Code::kInvalidArgument);
}

TEST_F(RawTcpTest, ALostServerIsAnError) {
  RawTcpLoad load;
  load.up_bytes = 1 << 20;
  load.connections = 2;
  load.together = true;
  const Result<std::unique_ptr<RawTcpClient>> client =
      RawTcpClient::Connect(server_->address(), load);
  ASSERT_TRUE(client.ok());
  server_.reset();
  EXPECT_FALSE((*client)->Drive(0.02).ok());
}

}  // namespace
}  // namespace attend::bench
