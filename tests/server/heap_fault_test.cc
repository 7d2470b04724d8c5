// SPDX-License-Identifier: Apache-2.0
//
// The N-th allocation of the process fails, for every N of a call or a stream: it ends once, with
// its answer or with RESOURCE_EXHAUSTED, nothing is kept, and the server serves on.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "server/memory_reserve.h"
#include "tests/kernels/counted_new.h"
#include "tests/server/chunked_client.h"
#include "tests/server/messages.h"
#include "tests/server/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

// In pieces of 64 KiB: what glibc maps one by one cannot come back in a process without address
// space.
constexpr int64_t kReserveBytes = int64_t{512} << 10;
// More than any of these calls has, client included.
constexpr int64_t kAllocationsMost = 20'000;

class HeapFaultTest : public ::testing::Test {
 protected:
  HeapFaultTest() {
    KeepMemoryReserve(kReserveBytes);
    server_ = std::make_unique<TestServer>();
    channel_ = server_->Connect();
    stub_ = v1::AttentionService::NewStub(channel_);
  }

  // `call` makes one call and says how it ended; a good answer has been checked.
  template <class Call>
  void Sweep(const Call& call) {
    ASSERT_TRUE(call().ok());
    int64_t nth = 1;
    for (bool reached = true; reached; ++nth) {
      ASSERT_LT(nth, kAllocationsMost);
      const test::HeapFault fault(nth);
      const grpc::Status status = call();
      ASSERT_TRUE(status.ok() || status.error_code() == StatusCode::RESOURCE_EXHAUSTED)
          << nth << ": " << status.error_code() << " " << status.error_message();
      reached = fault.reached();
    }
    EXPECT_GT(nth, 50) << "the faults met nothing";
    EXPECT_TRUE(call().ok());
    Engine& engine = server_->server().engine();
    const TimePoint until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    EXPECT_TRUE(engine.WaitIdle(until));
    while (engine.host_pool().used_bytes() > 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_EQ(engine.host_pool().used_bytes(), 0);
  }

  grpc::Status Judged(const v1::AttendResponse& response) {
    const std::string fault = test::Judge(problem_, response);
    return fault.empty() ? grpc::Status::OK : grpc::Status(StatusCode::DATA_LOSS, fault);
  }

  std::unique_ptr<TestServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  WireProblem problem_ = test::PlainWireProblem(1);
};

// In a process that has no address space left for a while.
void UseUpTheReserve() {
  KeepMemoryReserve(kReserveBytes);
  std::vector<void*> taken;
  taken.reserve(1 << 16);
  rlimit before = {};
  getrlimit(RLIMIT_AS, &before);
  const rlimit none = {0, before.rlim_max};
  if (setrlimit(RLIMIT_AS, &none) != 0) _exit(2);
  try {
    while (taken.size() < taken.capacity()) taken.push_back(::operator new(32 << 10));
  } catch (const std::bad_alloc&) {
    if (!MemoryIsShort()) _exit(3);
    for (void* each : taken) ::operator delete(each);
    setrlimit(RLIMIT_AS, &before);
    _exit(MemoryIsShort() ? 4 : 0);
  }
  _exit(5);
}

TEST(MemoryReserveTest, IsUsedInNeedAndMadeAgain) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's own memory comes from the same address space";
#endif
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(UseUpTheReserve(), ::testing::ExitedWithCode(0), "");
}

TEST_F(HeapFaultTest, Unary) {
  Sweep([this] {
    grpc::ClientContext context;
    v1::AttendResponse response;
    const grpc::Status status = stub_->Attend(&context, problem_.request, &response);
    return status.ok() ? Judged(response) : status;
  });
}

TEST_F(HeapFaultTest, UnaryWithACheck) {
  problem_.request.set_check(true);
  Sweep([this] {
    grpc::ClientContext context;
    v1::AttendResponse response;
    const grpc::Status status = stub_->Attend(&context, problem_.request, &response);
    return status.ok() ? Judged(response) : status;
  });
}

TEST_F(HeapFaultTest, Stream) {
  Sweep([this] {
    grpc::ClientContext context;
    v1::AttendResponse response;
    const auto stream = stub_->AttendStream(&context);
    stream->Write(problem_.request);
    stream->WritesDone();
    const bool answered = stream->Read(&response);
    const grpc::Status status = stream->Finish();
    if (!answered || !status.ok()) return status;
    if (response.status().code() == 0) return Judged(response);
    return grpc::Status(static_cast<StatusCode>(response.status().code()),
                        response.status().message());
  });
}

TEST_F(HeapFaultTest, Chunked) {
  std::mt19937_64 random(1);
  const v1::AttendRequest header = test::ChunkedHeader(problem_.request);
  const std::vector<test::Chunk> chunks = test::CutToChunks(problem_.request, 1 << 20, random);
  Sweep([&] {
    grpc::ClientContext context;
    const auto stream = stub_->AttendChunked(&context);
    v1::AttendChunkedRequest message;
    *message.mutable_header() = header;
    bool open = stream->Write(message);
    for (const test::Chunk& chunk : chunks) {
      message.Clear();
      message.set_tensor(static_cast<v1::TensorName>(chunk.tensor));
      message.set_offset(chunk.offset);
      message.set_data(chunk.data);
      open = open && stream->Write(message);
    }
    stream->WritesDone();
    test::AnswerBuilder answer;
    v1::AttendChunkedResponse part;
    while (stream->Read(&part)) answer.Add(part);
    const grpc::Status status = stream->Finish();
    if (!status.ok()) return status;
    std::string fault;
    const v1::AttendResponse response = answer.Build(&fault);
    return fault.empty() ? Judged(response) : grpc::Status(StatusCode::DATA_LOSS, fault);
  });
}

}  // namespace
}  // namespace attend
