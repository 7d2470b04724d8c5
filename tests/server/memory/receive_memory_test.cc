// SPDX-License-Identifier: Apache-2.0
//
// Page-locked memory, and a server whose messages are received in it.

#include "server/memory/receive_memory.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

class NotingAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t) override { return Unimplemented("not asked for"); }
  void Free(void*, int64_t) override {}
  Status Register(void* data, int64_t bytes) override {
    if (!refusal.ok()) return refusal;
    registered[data] = bytes;
    return Status();
  }
  void Unregister(void* data, int64_t bytes) override {
    EXPECT_EQ(registered[data], bytes);
    registered.erase(data);
  }
  std::map<void*, int64_t> registered;
  Status refusal;
};

TEST(ReceiveMemory, IsLockedUntilItIsDestroyed) {
  char data[64];
  NotingAllocator allocator;
  Result<std::unique_ptr<ReceiveMemory>> memory = ReceiveMemory::Lock(allocator, data, 64);
  ASSERT_TRUE(memory.ok()) << memory.status().message();
  EXPECT_EQ((*memory)->bytes(), 64);
  EXPECT_EQ(allocator.registered.at(data), 64);
  memory->reset();
  EXPECT_TRUE(allocator.registered.empty());
}

TEST(ReceiveMemory, ARefusalToLockIsReported) {
  char data[64];
  NotingAllocator allocator;
  allocator.refusal = ResourceExhausted("too much is locked");
  EXPECT_EQ(ReceiveMemory::Lock(allocator, data, 64).status().message(), "too much is locked");
  EXPECT_EQ(ReceiveMemory::Lock(allocator, nullptr, 0).status().code(), Code::kInvalidArgument);
}

TEST(ReceiveMemory, ContainsExactlyItsRange) {
  char data[64];
  NotingAllocator allocator;
  const auto memory = *ReceiveMemory::Lock(allocator, data + 8, 48);
  EXPECT_TRUE(memory->Contains(data + 8, 48));
  EXPECT_TRUE(memory->Contains(data + 56, 0));
  EXPECT_FALSE(memory->Contains(data + 7, 1));
  EXPECT_FALSE(memory->Contains(data + 8, 49));
  EXPECT_FALSE(memory->Contains(data + 57, 0));
  EXPECT_FALSE(memory->Contains(nullptr, 1));
}

TEST(ReceiveMemory, LargeMessagesAreReceivedInIt) {
  test::TestServer server({}, 1, test::TestServer::Devices::kGathering);
  const auto stub = server.Stub();
  bool first = true;                           // tells the transport to read into blocks
  for (const int64_t rows : {256, 80, 256}) {  // 1.5 MiB, 120 KiB
    test::WireProblem problem = test::PlainWireProblem(test::FreshSeed(), rows, rows);
    const int64_t before = server.backend().gathered_items();
    grpc::ClientContext context;
    v1::AttendResponse response;
    const grpc::Status status = stub->Attend(&context, problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(test::Judge(problem, response), "");
    EXPECT_TRUE(std::exchange(first, false) || server.backend().gathered_items() > before) << rows;
  }
}

TEST(ReceiveMemory, WithoutItMessagesAreCopied) {
  test::TestServer server([](Config& config) { config.receive_memory_bytes = 0; }, 1,
                          test::TestServer::Devices::kGathering);
  EXPECT_EQ(server.log().find("messages are copied"), std::string::npos);
  const auto stub = server.Stub();
  test::WireProblem problem = test::PlainWireProblem(test::FreshSeed(), 80, 64);
  grpc::ClientContext context;
  v1::AttendResponse response;
  ASSERT_TRUE(stub->Attend(&context, problem.request, &response).ok());
  EXPECT_EQ(test::Judge(problem, response), "");
  EXPECT_EQ(server.backend().gathered_items(), 0);
}

}  // namespace
}  // namespace attend
