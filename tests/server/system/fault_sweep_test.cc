// SPDX-License-Identifier: Apache-2.0
//
// The N-th call of every entry point of the backend's interface fails, for every N, in a whole
// server with callers of every kind: each call ends once, with the right answer or the status of
// the fault; nothing is leaked; and the server keeps serving, or reports that it cannot. For
// regions and imports see fault_sweep_regions_test.cc, for staging chunked_staging_test.cc.

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "tests/server/support/chunked_client.h"
#include "tests/server/support/health_client.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/region_client.h"
#include "tests/server/support/shared_memory_fixture.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

using grpc::StatusCode;
using test::ChunkedStreamClient;
using test::FakeBackend;
using test::Health;
using test::TestServer;
using test::WireProblem;

constexpr char kService[] = "attend.v1.AttentionService";
constexpr int kLanes = 2;
constexpr int kBatchRequestsMax = 2;
constexpr int64_t kBudgetBytes = int64_t{64} << 20;
// Longer ones are not computed: their O is V.
constexpr int64_t kComputedLengthMax = 1000;

void Compute(const Attention& a) {
  if (a.problem.len_q <= kComputedLengthMax) return CpuReference(a);
  std::memcpy(a.o.data, a.v.data, static_cast<size_t>(ElementsO(a.problem)) * 4);
}

std::string JudgeAny(WireProblem& problem, const v1::AttendResponse& response) {
  if (problem.spec.problem.len_q <= kComputedLengthMax) return test::Judge(problem, response);
  return response.raw(0) == problem.request.raw(2) ? "" : "O is not V";
}

void Settings(Config& config) {
  config.lanes = kLanes;
  config.max_batch_requests = kBatchRequestsMax;
  config.memory_budget_bytes = kBudgetBytes;
  config.copy_threads = 2;
}

// Callers of every kind, all at once. Can be run repeatedly.
class Workload {
 public:
  Workload() {
    for (int i = 0; i < 3; ++i) unary_.push_back(test::PlainWireProblem(i, 5 + i));
    large_.push_back(test::PlainWireProblem(10, 1500, 64));  // through the copy threads
    large_.push_back(test::PlainWireProblem(11, 9));
    for (int i = 0; i < 4; ++i) stream_.push_back(test::PlainWireProblem(20 + i, 16 + i));
    chunked_.push_back(test::PlainWireProblem(30, 20));
    chunked_.push_back(test::PlainWireProblem(31, 1100, 64));
    for (int i = 0; i < 2; ++i) shared_.push_back(test::PlainWireProblem(40 + i, 7 + i));
  }
  static constexpr int kRequests = 3 + 2 + 4 + 2 + 2 + 2;

  // How each request ended. OK answers have been checked.
  std::vector<grpc::Status> Run(TestServer& server) {
    std::vector<grpc::Status> ends[5];
    std::vector<std::thread> callers;
    callers.emplace_back([&] { ends[0] = CallUnary(server, unary_); });
    callers.emplace_back([&] { ends[1] = CallUnary(server, large_); });
    callers.emplace_back([&] { ends[2] = CallStream(server); });
    callers.emplace_back([&] {
      for (const int streams : {1, 3}) CallChunked(server, streams, &ends[3]);
    });
    callers.emplace_back([&] { ends[4] = CallShared(server); });
    for (std::thread& caller : callers) caller.join();
    std::vector<grpc::Status> all;
    for (const auto& each : ends) all.insert(all.end(), each.begin(), each.end());
    return all;
  }

  // Id of the last chunked request that was admitted; empty if there was none.
  const std::string& token() const { return token_; }

 private:
  static std::vector<grpc::Status> CallUnary(TestServer& server,
                                             std::vector<WireProblem>& problems) {
    std::vector<grpc::Status> ends;
    const auto stub = server.Stub();
    for (WireProblem& problem : problems) {
      v1::AttendResponse response;
      grpc::ClientContext context;
      ends.push_back(stub->Attend(&context, problem.request, &response));
      if (ends.back().ok()) {
        EXPECT_EQ(JudgeAny(problem, response), "");
      }
    }
    return ends;
  }

  std::vector<grpc::Status> CallStream(TestServer& server) {
    std::vector<grpc::Status> ends;
    std::map<std::string, WireProblem*> open;
    const auto stub = server.Stub();
    grpc::ClientContext context;
    const auto stream = stub->AttendStream(&context);
    for (WireProblem& problem : stream_) {
      open.emplace(problem.request.request_id(), &problem);
      EXPECT_TRUE(stream->Write(problem.request));
    }
    stream->WritesDone();
    v1::AttendResponse response;
    while (stream->Read(&response)) {
      const auto found = open.find(response.request_id());
      if (found == open.end()) {
        ADD_FAILURE() << response.request_id() << " was answered twice, or never sent";
        continue;
      }
      const auto code = static_cast<StatusCode>(response.status().code());
      ends.emplace_back(code, response.status().message());
      if (ends.back().ok()) {
        EXPECT_EQ(JudgeAny(*found->second, response), "");
      }
      open.erase(found);
    }
    EXPECT_TRUE(open.empty()) << open.size() << " have no answer";
    EXPECT_TRUE(stream->Finish().ok());
    return ends;
  }

  void CallChunked(TestServer& server, int streams, std::vector<grpc::Status>* ends) {
    for (WireProblem& problem : chunked_) {
      const test::ChunkedOutcome outcome =
          test::AttendOverStreams(server, problem.request, streams, 100'000, 1);
      ends->push_back(outcome.statuses.front());
      for (const grpc::Status& status : outcome.statuses) {
        EXPECT_EQ(status.error_code(), ends->back().error_code()) << status.error_message();
        EXPECT_EQ(status.error_message(), ends->back().error_message());
      }
      EXPECT_EQ(outcome.fault, "");
      if (outcome.ok()) {
        EXPECT_EQ(JudgeAny(problem, outcome.response), "");
      }
      if (!outcome.token.empty()) token_ = outcome.token;
    }
  }

  // Tensors and answers in one region of the caller's own.
  std::vector<grpc::Status> CallShared(TestServer& server) {
    std::vector<grpc::Status> ends;
    test::RegionClient client(server.server().shared_memory()->socket_path());
    const auto region = client.Create(1 << 16);
    const auto stub = server.Stub();
    for (WireProblem& problem : shared_) {
      std::memset(region->data(), 0xff, static_cast<size_t>(region->bytes()));  // NaN
      v1::AttendRequest request = problem.request;
      const int64_t behind = test::PutTensors(*region, 0, &request);
      test::PlaceOutputs(*region, behind, 4096, &request);
      v1::AttendResponse response;
      grpc::ClientContext context;
      ends.push_back(stub->Attend(&context, request, &response));
      if (ends.back().ok()) {
        EXPECT_EQ(response.transport(), "shm");
        EXPECT_EQ(JudgeAny(problem, test::WithBytes(*region, response)), "");
      }
    }
    return ends;
  }

  std::vector<WireProblem> unary_, large_, stream_, chunked_, shared_;
  std::string token_;
};

struct Expected {
  StatusCode code;
  std::string text;  // in every message
};

// Number of failed requests; each must have the expected status.
int CountFailed(const std::vector<grpc::Status>& ends, const Expected& expected) {
  EXPECT_EQ(ends.size(), size_t{Workload::kRequests});
  int failed = 0;
  for (const grpc::Status& end : ends) {
    if (end.ok()) continue;
    ++failed;
    EXPECT_EQ(end.error_code(), expected.code) << end.error_message();
    EXPECT_NE(end.error_message().find(expected.text), std::string::npos) << end.error_message();
  }
  return failed;
}

int CountLines(const std::string& log, const std::string& what) {
  int count = 0;
  for (size_t at = log.find(what); at != std::string::npos; at = log.find(what, at + 1)) ++count;
  return count;
}

// Each request ends with one log line.
void ExpectEnds(const TestServer& server, int requests) {
  const std::string log = server.log();
  EXPECT_EQ(CountLines(log, "request done id=") + CountLines(log, "request failed id="), requests);
}

class FaultSweepTest : public SharedMemoryTest {
 protected:
  // Replaces the previous server, if there was one.
  TestServer& StartAnew(int devices = 1) {
    server_.reset();
    std::filesystem::remove_all(folder_);
    Start(Settings, devices);
    return *server_;
  }
  // A header that takes the whole share of incomplete uploads is admitted: it is the only one.
  void ExpectTheWholeUploadShare() {
    v1::AttendRequest header;
    const auto set = [](v1::Tensor* tensor, int64_t length, int64_t dim) {
      tensor->set_dtype(v1::DTYPE_FLOAT32);
      for (const int64_t size : {int64_t{1}, int64_t{1}, length, dim}) tensor->add_shape(size);
      tensor->mutable_chunked();
    };
    set(header.mutable_q(), 65536, 128);  // half of the budget
    set(header.mutable_k(), 0, 128);
    set(header.mutable_v(), 0, 64);  // O: a quarter
    ChunkedStreamClient client(*server_);
    ASSERT_TRUE(client.SendHeader(header));
    v1::AttendChunkedResponse grant;
    EXPECT_TRUE(client.Receive(&grant));
    EXPECT_EQ(server_->server().engine().host_pool().used_bytes(), kBudgetBytes / 4 * 3);
    client.Cancel();
    client.Finish();
    WaitUntilEmpty();
  }
};

void AwaitTokenForgotten(const TestServer& server, const std::string& token) {
  for (;;) {
    ChunkedStreamClient client(server);
    client.SendToken(token);
    const grpc::Status status = client.Finish();
    ASSERT_EQ(status.error_code(), StatusCode::NOT_FOUND);
    if (status.error_message() == "no request has this token") return;
  }
}

struct Fault {
  const char* name;
  void (FakeBackend::*fail)(int, Status);
  int64_t FakeBackend::Calls::*calls;
  Status status;
  int requests_max;  // that one fault may end
};

const Fault kFaults[] = {
    {"Submit, device memory", &FakeBackend::FailSubmit, &FakeBackend::Calls::submit,
     ResourceExhausted("allocating 123 bytes on cpu: cudaErrorPretend"), kBatchRequestsMax},
    {"Submit, launch", &FakeBackend::FailSubmit, &FakeBackend::Calls::submit,
     Internal("launching on cpu: cudaErrorPretend"), kBatchRequestsMax},
    {"item, copy in", &FakeBackend::FailItem, &FakeBackend::Calls::item,
     Internal("copy in on cpu: cudaErrorPretend"), 1},
    {"batch, copy out", &FakeBackend::FailBatch, &FakeBackend::Calls::batch,
     Internal("copy out on cpu: cudaErrorPretend"), kBatchRequestsMax},
};

Expected ExpectedOf(const Status& status) {
  return {static_cast<StatusCode>(status.code()), status.message()};
}

TEST_F(FaultSweepTest, AFailedCallOfALaneEndsOnlyItsRequests) {
  TestServer& server = StartAnew();
  FakeBackend& backend = server.backend();
  backend.SetCompute(Compute);
  Workload workload;
  int sent = 0;
  const auto run = [&](const Expected& expected) {
    const int failed = CountFailed(workload.Run(server), expected);
    sent += Workload::kRequests;
    WaitUntilEmpty();
    backend.ForgetFaults();
    return failed;
  };
  EXPECT_EQ(run({}), 0);
  for (const Fault& fault : kFaults) {
    const Expected expected = ExpectedOf(fault.status);
    for (int n = 1; n <= Workload::kRequests; ++n) {
      SCOPED_TRACE(std::string(fault.name) + ", call " + std::to_string(n));
      const int64_t before = backend.calls().*fault.calls;
      (backend.*fault.fail)(n, fault.status);
      const int failed = run(expected);
      const bool met = backend.calls().*fault.calls - before >= n;  // batches vary
      EXPECT_GE(failed, met ? 1 : 0);
      EXPECT_LE(failed, met ? fault.requests_max : 0);
      EXPECT_TRUE(met || n > Workload::kRequests / kBatchRequestsMax);
    }
    for (int n = 1; n <= Workload::kRequests; ++n) (backend.*fault.fail)(n, fault.status);
    EXPECT_EQ(run(expected), Workload::kRequests) << "every call failed";
    EXPECT_EQ(run({}), 0) << "and the next ones not";
  }
  ExpectEnds(server, sent);
  ExpectTheWholeUploadShare();
  AwaitTokenForgotten(server, workload.token());
  EXPECT_EQ(test::CheckHealth(server.Connect(), kService), Health::kServing);
  EXPECT_TRUE(server.server().Drain(std::chrono::seconds(60)));
}

TEST_F(FaultSweepTest, ALostDeviceEndsItsRequestsAndIsReported) {
  Workload workload;
  for (int n = 1; n <= Workload::kRequests; ++n) {
    SCOPED_TRACE("batch " + std::to_string(n));
    TestServer& server = StartAnew();
    server.backend().SetCompute(Compute);
    server.backend().LoseDevice(n);
    const int failed = CountFailed(workload.Run(server), {StatusCode::UNAVAILABLE, "device"});
    WaitUntilEmpty();
    ExpectEnds(server, Workload::kRequests);
    if (server.backend().calls().batch < n) {  // batches vary
      EXPECT_GT(n, Workload::kRequests / kBatchRequestsMax);
      EXPECT_EQ(failed, 0);
      continue;
    }
    EXPECT_GE(failed, 1);
    // For good, and the server reports it when asked.
    EXPECT_EQ(CountFailed(workload.Run(server), {StatusCode::UNAVAILABLE, "no device is healthy"}),
              Workload::kRequests);
    EXPECT_EQ(test::CheckHealth(server.Connect(), kService), Health::kNotServing);
    EXPECT_EQ(test::CheckHealth(server.Connect(), ""), Health::kNotServing);
    v1::GetServerInfoResponse info;
    grpc::ClientContext context;
    ASSERT_TRUE(server.Stub()->GetServerInfo(&context, {}, &info).ok());
    EXPECT_FALSE(info.devices(0).healthy());
    EXPECT_EQ(CountLines(server.log(), "device lost device=\"cpu\"\n"), 1);
    WaitUntilEmpty();
  }
}

TEST_F(FaultSweepTest, OneLostDeviceOfTwoLeavesTheServerServing) {
  TestServer& server = StartAnew(2);
  Workload workload;
  for (const int i : {0, 1}) server.backend(i).SetCompute(Compute);
  server.backend(0).LoseDevice();
  EXPECT_GE(CountFailed(workload.Run(server), {StatusCode::UNAVAILABLE, "device cpu"}), 1);
  WaitUntilEmpty();
  EXPECT_EQ(CountFailed(workload.Run(server), {}), 0) << "the other serves all";
  WaitUntilEmpty();
  EXPECT_EQ(test::CheckHealth(server.Connect(), kService), Health::kServing);
  ExpectTheWholeUploadShare();
  server.backend(1).LoseDevice();
  EXPECT_GE(CountFailed(workload.Run(server), {StatusCode::UNAVAILABLE, "device"}), 1);
  EXPECT_EQ(test::CheckHealth(server.Connect(), kService), Health::kNotServing);
}

// The result of starting a server whose devices are `backends`.
Status StartOf(std::vector<std::unique_ptr<Backend>> backends) {
  Config config;
  Settings(config);
  config.listen = {"127.0.0.1:0"};
  config.metrics_listen = "off";
  const auto logger =
      std::make_shared<Logger>(Logger::Options(), std::make_shared<spdlog::sinks::null_sink_mt>());
  return Server::Start(config, std::move(backends), logger).status();
}

TEST(FaultSweepStartTest, AFailedLaneFailsTheStart) {
  constexpr int kDevices = 2;
  for (int n = 0; n < kDevices * kLanes; ++n) {
    std::vector<std::unique_ptr<Backend>> backends;
    for (int i = 0; i < kDevices; ++i) {
      auto backend = std::make_unique<FakeBackend>("cpu" + std::to_string(i));
      const int lane = n - i * kLanes;
      if (lane >= 0) backend->FailMakeLane(lane + 1, ResourceExhausted("making a lane on it"));
      backends.push_back(std::move(backend));
    }
    const Status status = StartOf(std::move(backends));
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(status.message(), "making a lane on it");
  }
}

TEST(FaultSweepStartTest, AHostWithoutTheBudgetsMemoryFailsTheStart) {
  auto backend = std::make_unique<FakeBackend>();
  backend->FailAllocate(1, ResourceExhausted("page-locking 123 bytes"));
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(std::move(backend));
  const Status status = StartOf(std::move(backends));
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.message(), "cannot allocate the memory budget: page-locking 123 bytes");
}

}  // namespace
}  // namespace attend
