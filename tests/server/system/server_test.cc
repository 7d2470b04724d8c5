// SPDX-License-Identifier: Apache-2.0
//
// Whole servers: unary calls, health, reflection, info, deadlines, cancellation, overload, drain.

#include "server/app/server.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "server/engine/engine.h"
#include "tests/server/support/health_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::TestServer;
using test::WireProblem;

// A unary call on a thread of its own.
struct AsyncCall {
  AsyncCall(v1::AttentionService::Stub& stub, const v1::AttendRequest& request)
      : request(request), done(std::async(std::launch::async, [this, &stub] {
          return stub.Attend(&context, this->request, &response);
        })) {}
  grpc::Status Wait() { return done.get(); }

  v1::AttendRequest request;
  v1::AttendResponse response;
  grpc::ClientContext context;
  std::future<grpc::Status> done;
};

int PushbackMs(const grpc::ClientContext& context) {
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto found = metadata.find("grpc-retry-pushback-ms");
  if (found == metadata.end()) return -1;
  return std::atoi(std::string(found->second.data(), found->second.size()).c_str());
}

TEST(ServerTest, AnswersAnyRequestExactly) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TestServer server;
  const auto stub = server.Stub();
  const int rounds = std::max(20, static_cast<int>(200 * test::TestScale()));
  for (int i = 0; i < rounds; ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i);
    problem.request.set_check(i % 4 == 0);
    v1::AttendResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub->Attend(&context, problem.request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message() << Describe(problem.spec);
    EXPECT_EQ(test::Judge(problem, response), "") << Describe(problem.spec);
    EXPECT_EQ(response.request_id(), problem.request.request_id());
    EXPECT_EQ(response.device(), "cpu");
    EXPECT_EQ(response.transport(), "inline");
    EXPECT_GE(response.batch_requests(), 1);
    EXPECT_GT(response.timings().total_ns(), 0);
    EXPECT_EQ(response.has_check(), problem.request.check());
    EXPECT_TRUE(!response.has_check() || response.check().ok()) << response.check().detail();
  }
}

TEST(ServerTest, LargeRequestsGoThroughTheCopyThreadsInAnyOrder) {
  const uint64_t seed = test::FreshSeed();
  std::mt19937_64 random(seed);
  TestServer server([](Config& config) { config.copy_threads = 3; });
  // Computing would take long; what counts is that every byte of V arrives: O is V's first rows.
  server.backend().SetCompute([](const Attention& a) {
    std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
  });
  const auto channel = server.Connect();
  for (const bool shuffled : {false, true}) {
    WireProblem problem = test::PlainWireProblem(seed, 6000, 128);  // 18 MiB
    const std::string bytes = problem.request.SerializeAsString();
    v1::AttendResponse response;
    const grpc::Status status =
        test::SendBytes(channel, shuffled ? test::Shuffled(bytes, random) : bytes, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(response.raw(0) == problem.request.raw(2));
  }
}

TEST(ServerTest, MakesARequestIdWhereTheClientGaveNone) {
  TestServer server;
  WireProblem problem = test::PlainWireProblem(1);
  problem.request.clear_request_id();
  v1::AttendResponse first, second;
  grpc::ClientContext context1, context2;
  const auto stub = server.Stub();
  ASSERT_TRUE(stub->Attend(&context1, problem.request, &first).ok());
  ASSERT_TRUE(stub->Attend(&context2, problem.request, &second).ok());
  EXPECT_FALSE(first.request_id().empty());
  EXPECT_NE(first.request_id(), second.request_id());
}

TEST(ServerTest, DeadlineInThePastIsRefused) {
  TestServer server;
  WireProblem problem = test::PlainWireProblem(2);
  v1::AttendResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() - seconds(1));
  const grpc::Status status = server.Stub()->Attend(&context, problem.request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(server.backend().submitted_items(), 0);
}

TEST(ServerTest, DeadlineFiresInTheQueueWhileTheDeviceIsBusy) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const auto stub = server.Stub();
  AsyncCall running(*stub, test::PlainWireProblem(3).request);
  server.backend().WaitForWaiting(1);
  v1::AttendResponse response;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + milliseconds(50));
  const grpc::Status status = stub->Attend(&context, test::PlainWireProblem(4).request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  // The client's clock may be ahead of the server's timer.
  while (server.server().engine().inflight() > 1) std::this_thread::yield();
  server.backend().Release();
  EXPECT_TRUE(running.Wait().ok());
  EXPECT_EQ(server.backend().submitted_items(), 1);  // the late one never ran
}

TEST(ServerTest, CancelledWorkIsDroppedFromTheQueue) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const auto stub = server.Stub();
  AsyncCall running(*stub, test::PlainWireProblem(5).request);
  server.backend().WaitForWaiting(1);
  AsyncCall queued(*stub, test::PlainWireProblem(6).request);
  server.WaitForQueued(1);
  queued.context.TryCancel();
  EXPECT_EQ(queued.Wait().error_code(), StatusCode::CANCELLED);
  while (server.server().engine().inflight() > 1) std::this_thread::yield();
  server.backend().Release();
  EXPECT_TRUE(running.Wait().ok());
  EXPECT_EQ(server.backend().submitted_items(), 1);
}

TEST(ServerTest, ADisconnectedClientHarmsNobody) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const auto stub = server.Stub();
  auto gone = std::make_unique<AsyncCall>(*stub, test::PlainWireProblem(7).request);
  server.backend().WaitForWaiting(1);
  gone->context.TryCancel();  // its batch runs on
  EXPECT_EQ(gone->Wait().error_code(), StatusCode::CANCELLED);
  gone.reset();
  server.backend().Release();
  WireProblem good = test::PlainWireProblem(8);
  v1::AttendResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub->Attend(&context, good.request, &response).ok());
  EXPECT_EQ(test::Judge(good, response), "");
  while (server.server().engine().host_pool().used_bytes() > 0) std::this_thread::yield();
}

TEST(ServerTest, AFullQueueRefusesWithARetryHint) {
  TestServer server([](Config& config) {
    config.lanes = 1;
    config.max_queue = 2;
    config.metrics_listen = "127.0.0.1:0";
  });
  server.backend().Hold();
  const auto stub = server.Stub();
  std::vector<std::unique_ptr<AsyncCall>> accepted;
  accepted.push_back(std::make_unique<AsyncCall>(*stub, test::PlainWireProblem(9).request));
  server.backend().WaitForWaiting(1);
  for (int i = 0; i < 2; ++i) {
    accepted.push_back(std::make_unique<AsyncCall>(*stub, test::PlainWireProblem(10 + i).request));
  }
  server.WaitForQueued(2);
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub->Attend(&context, test::PlainWireProblem(12).request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_GT(PushbackMs(context), 0);
  EXPECT_EQ(server.Metric("attend_rejected_requests_total{reason=\"queue_full\"}"), 1);
  EXPECT_EQ(server.Metric("attend_inflight_requests"), 3);
  EXPECT_EQ(server.Metric("attend_queue_requests{device=\"cpu\"}"), 2);
  server.backend().Release();
  for (const auto& call : accepted) EXPECT_TRUE(call->Wait().ok());
}

TEST(ServerTest, TheMemoryBudgetIsAdmission) {
  TestServer server([](Config& config) {
    config.lanes = 1;
    config.memory_budget_bytes = 100000;
  });
  server.backend().Hold();
  const auto stub = server.Stub();
  WireProblem big = test::PlainWireProblem(13, 64, 32);  // 4 x 16 KiB
  AsyncCall first(*stub, big.request);
  server.backend().WaitForWaiting(1);
  v1::AttendResponse response;
  grpc::ClientContext full;
  grpc::Status status = stub->Attend(&full, big.request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_GT(PushbackMs(full), 0);
  // What can never fit is the request's fault, not the moment's.
  grpc::ClientContext never;
  status = stub->Attend(&never, test::PlainWireProblem(14, 128, 32).request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_NE(status.error_message().find("memory budget of 100000"), std::string::npos);
  server.backend().Release();
  ASSERT_TRUE(first.Wait().ok());
  EXPECT_EQ(test::Judge(big, first.response), "");
}

TEST(ServerTest, MessagesAboveTheLimitAreRefused) {
  TestServer server([](Config& config) { config.max_request_bytes = 4096; });
  const auto stub = server.Stub();
  v1::AttendResponse response;
  grpc::ClientContext little;
  grpc::Status status =
      stub->Attend(&little, test::PlainWireProblem(15, 16, 16).request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_NE(status.error_message().find("must have at most 4096"), std::string::npos);
  grpc::ClientContext much;
  status = stub->Attend(&much, test::PlainWireProblem(16, 128, 128).request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  // A small request whose answer would be large.
  WireProblem wide;
  wide.spec = test::MakeSpec(1, 1, 1, 64, 1, 1, 256);
  wide.owned = test::MakeAttention(wide.spec, 1);
  grpc::ClientContext answer;
  status = stub->Attend(&answer, test::ToRequest(wide.spec, wide.owned), &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_NE(status.error_message().find("the answer would have"), std::string::npos);
}

TEST(ServerTest, ADeviceFailureIsTheRequestsAlone) {
  TestServer server;
  server.backend().FailItem(1, Internal("cudaErrorPretend (999)"));
  const auto stub = server.Stub();
  WireProblem problem = test::PlainWireProblem(17);
  v1::AttendResponse response;
  grpc::ClientContext bad, good;
  const grpc::Status status = stub->Attend(&bad, problem.request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INTERNAL);
  EXPECT_NE(status.error_message().find("cudaErrorPretend"), std::string::npos);
  ASSERT_TRUE(stub->Attend(&good, problem.request, &response).ok());
  EXPECT_EQ(test::Judge(problem, response), "");
}

TEST(ServerTest, InfoTellsWhatTheServerIs) {
  TestServer server({}, 2);
  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  ASSERT_TRUE(server.Stub()->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.version(), Version());
  ASSERT_EQ(info.devices_size(), 2);
  EXPECT_EQ(info.devices(0).name(), "cpu");
  EXPECT_EQ(info.devices(0).lanes(), 2);
  EXPECT_TRUE(info.devices(0).healthy());
  ASSERT_EQ(info.kernels_size(), kKernelCount);
  for (const v1::KernelInfo& kernel : info.kernels()) {
    EXPECT_EQ(kernel.available(), kernel.device_kind() == "cpu") << kernel.name();
    const bool tensor_cores = kernel.name().find("_sm") != std::string::npos;
    EXPECT_EQ(kernel.dtypes_size(), tensor_cores ? 2 : 3) << kernel.name();
  }
  EXPECT_EQ(info.limits().head_dim_max(), 256);
  EXPECT_EQ(info.limits().request_bytes_max(), Config().max_request_bytes);
  EXPECT_EQ(info.limits().stream_requests_max(), Config().stream_requests_max);
  EXPECT_EQ(info.reference_check(), "off");
}

TEST(ServerTest, ReflectionListsTheService) {
  TestServer server;
  const std::vector<std::string> services = test::ListServices(server.Connect());
  EXPECT_NE(std::find(services.begin(), services.end(), "attend.v1.AttentionService"),
            services.end());
  EXPECT_NE(std::find(services.begin(), services.end(), "grpc.health.v1.Health"), services.end());
}

TEST(ServerTest, DrainFinishesWhatWasAcceptedAndRefusesTheRest) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const auto channel = server.Connect();
  const auto stub = v1::AttentionService::NewStub(channel);
  test::HealthWatch watch(channel, "attend.v1.AttentionService");
  EXPECT_EQ(watch.Next(), test::Health::kServing);
  EXPECT_EQ(test::CheckHealth(channel, ""), test::Health::kServing);

  WireProblem problem = test::PlainWireProblem(18);
  AsyncCall running(*stub, problem.request);
  server.backend().WaitForWaiting(1);
  AsyncCall queued(*stub, problem.request);
  server.WaitForQueued(1);
  std::future<bool> drained =
      std::async(std::launch::async, [&] { return server.server().Drain(seconds(60)); });
  EXPECT_EQ(watch.Next(), test::Health::kNotServing);
  EXPECT_EQ(test::CheckHealth(channel, ""), test::Health::kNotServing);
  while (!server.server().engine().draining()) std::this_thread::yield();
  v1::AttendResponse response;
  grpc::ClientContext context;
  const grpc::Status refused = stub->Attend(&context, problem.request, &response);
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE) << refused.error_message();
  EXPECT_GT(PushbackMs(context), 0);

  server.backend().Release();
  EXPECT_TRUE(running.Wait().ok());
  EXPECT_TRUE(queued.Wait().ok());
  EXPECT_EQ(test::Judge(problem, running.response), "");
  EXPECT_EQ(test::Judge(problem, queued.response), "");
  EXPECT_TRUE(drained.get());
}

TEST(ServerTest, DrainUnderLoadLosesNoAcceptedAnswer) {
  auto server = std::make_unique<TestServer>();
  std::atomic<int> ok{0};
  std::atomic<int> wrong{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&, i] {
      const auto stub = server->Stub();
      WireProblem problem = test::PlainWireProblem(100 + i);
      while (!stop) {
        v1::AttendResponse response;
        grpc::ClientContext context;
        const grpc::Status status = stub->Attend(&context, problem.request, &response);
        if (status.error_code() == StatusCode::UNAVAILABLE) continue;
        const bool right = status.ok() && test::Judge(problem, response).empty();
        ++(right ? ok : wrong);
        EXPECT_TRUE(right) << status.error_code() << " " << status.error_message();
      }
    });
  }
  while (ok < 50) std::this_thread::yield();
  EXPECT_TRUE(server->server().Drain(seconds(60)));
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ServerTest, DrainThatTakesTooLongSaysSo) {
  TestServer server([](Config& config) { config.lanes = 1; });
  server.backend().Hold();
  const auto stub = server.Stub();
  AsyncCall running(*stub, test::PlainWireProblem(19).request);
  server.backend().WaitForWaiting(1);
  EXPECT_FALSE(server.server().Drain(milliseconds(20)));
  server.backend().Release();
  running.Wait();
}

TEST(ServerTest, ServesUnixSocketsAndSeveralAddresses) {
  const std::string path = "/tmp/attend_test_" + std::to_string(getpid()) + ".sock";
  TestServer server([&](Config& config) { config.listen = {"127.0.0.1:0", "unix:" + path}; });
  ASSERT_EQ(server.server().addresses().size(), 2u);
  for (const std::string& address : server.server().addresses()) {
    WireProblem problem = test::PlainWireProblem(20);
    v1::AttendResponse response;
    grpc::ClientContext context;
    const auto stub = v1::AttentionService::NewStub(
        grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    const grpc::Status status = stub->Attend(&context, problem.request, &response);
    ASSERT_TRUE(status.ok()) << address << ": " << status.error_message();
    EXPECT_EQ(test::Judge(problem, response), "");
  }
  const std::string ready = path + ".json";
  ASSERT_TRUE(server.server().WriteReadyFile(ready).ok());
  const nlohmann::json json = nlohmann::json::parse(std::ifstream(ready));
  EXPECT_EQ(json["pid"], getpid());
  EXPECT_EQ(json["listen"][1], "unix:" + path);
  std::remove(ready.c_str());
}

TEST(ServerTest, ATakenAddressIsAnError) {
  TestServer first;
  try {
    TestServer second([&](Config& config) { config.listen = {first.address()}; });
    FAIL() << "the second server bound " << first.address();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("listen " + first.address() + " cannot be bound"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace attend
