// SPDX-License-Identifier: Apache-2.0
//
// The N-th allocation of the process fails, for every N of a call or stream: it ends once, with its
// answer or RESOURCE_EXHAUSTED, nothing is leaked, and the server keeps serving.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attend/v1/session.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/memory/memory_reserve.h"
#include "server/regions/shared_memory_server.h"
#include "server/sessions/session_table.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/health_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/own_allocations.h"
#include "tests/server/support/region_client.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::TestServer;
using test::WireProblem;

// In pieces of 64 KiB: memory that glibc maps separately cannot be mapped again without address
// space.
constexpr int64_t kReserveBytes = int64_t{512} << 10;
// More than any of these calls makes, including its client.
constexpr int64_t kAllocationsMost = 20'000;

// Which allocations fail: any one, once, so that the reserve helps; or the server's own,
// permanently. gRPC's allocations find the reserve used up, but do not need it, as memory is not
// really short.
enum class Fault { kAnyOnce, kOwnForGood };

class HeapFaultTest : public ::testing::TestWithParam<Fault> {
 protected:
  HeapFaultTest() {
    test::LearnOwnCode();
    KeepMemoryReserve(kReserveBytes);
    std::string pattern = std::filesystem::temp_directory_path() / "attend-heap-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    server_ = std::make_unique<TestServer>([this](Config& config) {
      config.shared_memory = true;
      config.shared_memory_socket = folder_ / "shm.sock";
      config.session_memory_bytes = int64_t{16} << 20;
    });
    channel_ = server_->Connect();
    stub_ = v1::AttentionService::NewStub(channel_);
  }

  ~HeapFaultTest() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  // `call` makes one call and returns its status; a successful answer has been checked. `throws`:
  // the server's own allocations are among those that may fail.
  template <class Call>
  void Sweep(const Call& call, bool throws = true) {
    throws &= GetParam() == Fault::kOwnForGood;
    int64_t refused = 0;
    bool (*const only)() = GetParam() == Fault::kAnyOnce ? nullptr : test::OfOwnCode;
    ASSERT_TRUE(call().ok());
    int64_t nth = 1, step = 1;
    for (bool reached = true; reached; nth += step) {
      ASSERT_LT(nth, kAllocationsMost);
      const test::HeapFault fault(nth, only);
      const grpc::Status status = call();
      ASSERT_TRUE(status.ok() || status.error_code() == StatusCode::RESOURCE_EXHAUSTED)
          << nth << ": " << status.error_code() << " " << status.error_message();
      refused += status.ok() ? 0 : 1;
      reached = fault.reached();
      // Asserts in sanitizer builds take thousands of allocations, and each call takes long.
      if (nth >= 300 && test::TestScale() < 1) step = 16;
    }
    EXPECT_GT(nth, 10) << "the faults met nothing";
    EXPECT_TRUE(call().ok());
    if (throws) {
      EXPECT_GT(refused, 0);
    } else {  // one allocation may fail just as the reserve is checked
      EXPECT_LT(refused * 10, nth);
    }
    Engine& engine = server_->server().engine();
    const TimePoint until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    EXPECT_TRUE(engine.WaitIdle(until));
    while (engine.host_pool().used_bytes() > 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_EQ(engine.host_pool().used_bytes(), 0);
  }

  // A call that does not end fails the test.
  static void LimitTime(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  }

  grpc::Status Judged(const v1::AttendResponse& response) {
    const std::string fault = test::Judge(problem_, response);
    return fault.empty() ? grpc::Status::OK : grpc::Status(StatusCode::DATA_LOSS, fault);
  }

  grpc::Status CallUnary() {
    grpc::ClientContext context;
    LimitTime(context);
    v1::AttendResponse response;
    const grpc::Status status = stub_->Attend(&context, problem_.request, &response);
    return status.ok() ? Judged(response) : status;
  }

  std::unique_ptr<TestServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::filesystem::path folder_;
  WireProblem problem_ = test::PlainWireProblem(1);
};

INSTANTIATE_TEST_SUITE_P(Faults, HeapFaultTest,
                         ::testing::Values(Fault::kAnyOnce, Fault::kOwnForGood),
                         [](const auto& each) {
                           return each.param == Fault::kAnyOnce ? "AnyOnce" : "OwnForGood";
                         });

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
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    while (taken.size() < taken.capacity()) taken.push_back(::operator new(32 << 10));
  } catch (const std::bad_alloc&) {
    if (!MemoryIsShort()) _exit(3);
    // The other half, which is reserved for allocations that must not fail.
    const OnNoMemory wait(OnNoMemory::kWait);
    for (int64_t bytes = 0; bytes < kReserveBytes / 4; bytes += 32 << 10) {
      taken.push_back(::operator new(32 << 10));
    }
    for (void* each : taken) ::operator delete(each);
    setrlimit(RLIMIT_AS, &before);
    _exit(MemoryIsShort() ? 4 : 0);
  }
  _exit(5);
}

// Memory that another thread frees during the wait suffices.
void WaitForAnother() {
  KeepMemoryReserve(kReserveBytes);
  std::atomic<bool> waits{false};
  std::atomic<bool> open{false};
  rlimit before = {};
  getrlimit(RLIMIT_AS, &before);
  std::thread another([&] {
    open = true;
    open.notify_one();
    waits.wait(false);
    setrlimit(RLIMIT_AS, &before);
  });
  open.wait(false);
  const rlimit none = {0, before.rlim_max};
  if (setrlimit(RLIMIT_AS, &none) != 0) _exit(2);
  int64_t taken = 0;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    for (;; ++taken) static_cast<void>(::operator new(32 << 10));
  } catch (const std::bad_alloc&) {
    waits = true;
    waits.notify_one();
    static_cast<void>(::operator new(32 << 10));
  }
  another.join();
  _exit(taken > 0 ? 0 : 3);
}

TEST(MemoryReserveTest, IsUsedWhenMemoryIsShortAndRefilled) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer's own memory comes from the same address space";
#endif
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(UseUpTheReserve(), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(WaitForAnother(), ::testing::ExitedWithCode(0), "");
}

TEST_P(HeapFaultTest, UnaryCallsSurviveEveryFault) {
  Sweep([this] { return CallUnary(); });
}

// Enough of them to be decoded on the server's own threads.
TEST_P(HeapFaultTest, UnaryCallsWithManyLengthsSurviveEveryFault) {
  if (GetParam() == Fault::kAnyOnce) GTEST_SKIP() << "the client's own are too many";
  problem_.spec = test::MakeSpec(1, 1, 1, 1, 1, 1, 1);
  problem_.spec.problem.packed = true;
  problem_.spec.q_lengths.assign(70'000, 0);
  problem_.spec.q_lengths.front() = 1;
  problem_.spec.kv_lengths = problem_.spec.q_lengths;
  problem_.owned = test::MakeAttention(problem_.spec, 1);
  problem_.request = test::ToRequest(problem_.spec, problem_.owned);
  Sweep([this] { return CallUnary(); });
}

// Above a mebibyte, which the server's own threads copy.
TEST_P(HeapFaultTest, LargeUnaryCallsSurviveEveryFault) {
  problem_.spec = test::MakeSpec(1, 1, 1, 1, 4096, 64, 64);
  problem_.owned = test::MakeAttention(problem_.spec, 1);
  problem_.request = test::ToRequest(problem_.spec, problem_.owned);
  ASSERT_GT(problem_.request.ByteSizeLong(), size_t{1} << 20);
  Sweep([this] { return CallUnary(); });
}

TEST_P(HeapFaultTest, CheckedUnaryCallsSurviveEveryFault) {
  problem_.request.set_check(true);
  Sweep([this] { return CallUnary(); });
}

TEST_P(HeapFaultTest, StreamsSurviveEveryFault) {
  Sweep([this] {
    grpc::ClientContext context;
    LimitTime(context);
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

TEST_P(HeapFaultTest, ChunkedCallsSurviveEveryFault) {
  std::mt19937_64 random(1);
  const v1::AttendRequest header = test::ChunkedHeader(problem_.request);
  const std::vector<test::Chunk> chunks = test::CutToChunks(problem_.request, 1 << 20, random);
  Sweep([&] {
    grpc::ClientContext context;
    LimitTime(context);
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

// A session is created, appended to, forked, truncated and freed. Sessions
// that a refused Free leaves are freed later.
TEST_P(HeapFaultTest, SessionCallsSurviveEveryFault) {
  const auto sessions = v1::SessionService::NewStub(channel_);
  std::vector<std::string> left;
  const auto free_all = [&] {
    std::erase_if(left, [&](const std::string& id) {
      v1::FreeSessionRequest request;
      request.set_session(id);
      v1::FreeSessionResponse response;
      grpc::ClientContext context;
      LimitTime(context);
      return sessions->FreeSession(&context, request, &response).ok();
    });
  };
  const auto make = [&](const auto& call, const auto& request, v1::Session& session) {
    grpc::ClientContext context;
    LimitTime(context);
    const grpc::Status status = (sessions.get()->*call)(&context, request, &session);
    if (status.ok()) left.push_back(session.id());
    return status;
  };
  Sweep([&]() -> grpc::Status {
    free_all();
    v1::CreateSessionRequest create;
    v1::LayerShape* const shape = create.add_shapes();
    shape->set_dtype(v1::DTYPE_FLOAT32);
    shape->set_heads_kv(2);
    shape->set_dim(16);
    v1::Session session, fork;
    grpc::Status status = make(&v1::SessionService::Stub::CreateSession, create, session);
    if (!status.ok()) return status;
    problem_.request.clear_sessions();
    problem_.request.add_sessions()->set_session(session.id());
    status = CallUnary();
    if (!status.ok()) return status;
    v1::ForkSessionRequest fork_request;
    fork_request.set_session(session.id());
    status = make(&v1::SessionService::Stub::ForkSession, fork_request, fork);
    if (!status.ok()) return status;
    v1::TruncateSessionRequest truncate;
    truncate.set_session(fork.id());
    truncate.set_length(3);
    grpc::ClientContext context;
    LimitTime(context);
    status = sessions->TruncateSession(&context, truncate, &fork);
    free_all();
    return status;
  });
  free_all();
  EXPECT_EQ(left.size(), 0);
  SessionTable& table = *server_->server().sessions();
  EXPECT_TRUE(table.Consistent());
  // The client never learnt the ids of some.
  for (const SessionInfo& info : table.List(0, "", 1000).sessions)
    EXPECT_TRUE(table.Free(0, info.id).ok());
  EXPECT_EQ(table.memory(0).used_bytes, 0);
}

// The server's other services: no fault ends the process or leaves a call unanswered.
TEST_P(HeapFaultTest, OtherServicesSurviveEveryFault) {
  Sweep([&] {
    grpc::ClientContext context;
    LimitTime(context);
    v1::GetServerInfoResponse info;
    const grpc::Status status = stub_->GetServerInfo(&context, {}, &info);
    EXPECT_NE(test::CheckHealth(channel_, ""), test::Health::kFailed);
    test::ListServices(channel_);
    return status;
  });
}

TEST_P(HeapFaultTest, RegionsSurviveEveryFault) {
  const std::string path = server_->server().shared_memory()->socket_path();
  Sweep(
      [&] {
        test::RegionClient client(path);
        v1::RegionRequest request;
        request.mutable_create()->set_bytes(1 << 20);
        UniqueFd file;
        const bool sent = client.Send(request.SerializeAsString());
        const std::optional<v1::RegionReply> reply = sent ? client.Receive(&file) : std::nullopt;
        if (reply && reply->has_created()) client.Release(reply->created().token());
        return grpc::Status::OK;
      },
      false);
}

}  // namespace
}  // namespace attend
