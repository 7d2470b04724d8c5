// SPDX-License-Identifier: Apache-2.0
//
// Dumps of failed checks: a dump reproduces the request, and the number of dumps is bounded.

#include "server/app/dump.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/messages.h"
#include "tests/server/support/temporary_directory.h"
#include "tests/server/support/test_server.h"

namespace attend {
namespace {

namespace fs = std::filesystem;
using test::ReadFile;
using test::TemporaryDirectory;
using test::WireProblem;

TEST(DumpTest, ADumpReproducesTheRequest) {
  const TemporaryDirectory directory;
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  test::TestServer server([&](Config& config) {
    config.reference_check = "all";
    config.check_sample = 1;
    config.check_dump_dir = directory.path().string();
    config.check_dump_max = 1 << 20;
    config.check_dump_interval_seconds = 0;
  });
  const auto stub = server.Stub();
  int dumped = 0;
  for (int i = 0; i < 60; ++i) {
    WireProblem problem = test::RandomWireProblem(seed + i, 2e4);
    problem.request.set_request_id("dump/" + std::to_string(i));
    server.backend().Corrupt([](const Attention& a) {
      if (CountRows(a) > 0) StoreElement(a.o.data, a.problem.dtype, 0, 1e4f);
    });
    v1::AttendResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(stub->Attend(&context, problem.request, &response).ok());
    server.backend().Corrupt({});
    const std::vector<fs::path> entries = directory.entries();
    if (response.check().ok()) {  // no rows, or the fault changed nothing
      EXPECT_TRUE(entries.empty());
      continue;
    }
    ++dumped;
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_TRUE(entries[0].filename().string().ends_with("Z-dump_" + std::to_string(i)));
    v1::AttendRequest again;
    v1::AttendResponse wrong, right;
    ASSERT_TRUE(again.ParseFromString(ReadFile(entries[0] / "request.binpb")));
    ASSERT_TRUE(wrong.ParseFromString(ReadFile(entries[0] / "response.binpb")));
    if (!problem.request.tree().empty()) problem.request.add_raw(*again.raw().rbegin());
    EXPECT_TRUE(std::ranges::equal(again.raw(), problem.request.raw()));  // a tree written out
    EXPECT_TRUE(std::ranges::equal(wrong.raw(), response.raw()));
    EXPECT_EQ(wrong.check().detail(), response.check().detail());
    const nlohmann::json report = nlohmann::json::parse(ReadFile(entries[0] / "report.json"));
    EXPECT_EQ(report["request_id"], "dump/" + std::to_string(i));
    EXPECT_EQ(report["device"], "cpu");
    EXPECT_EQ(report["detail"], response.check().detail());
    grpc::ClientContext replay;
    ASSERT_TRUE(stub->Attend(&replay, again, &right).ok());
    EXPECT_EQ(test::Judge(problem, right), "");
    fs::remove_all(entries[0]);
  }
  EXPECT_GT(dumped, 20);
  EXPECT_NE(server.log().find("reference check failed"), std::string::npos);
}

TEST(DumpTest, ADumpHasDropoutAndBitMask) {
  const TemporaryDirectory directory;
  test::TestServer server(
      [&](Config& config) { config.check_dump_dir = directory.path().string(); });
  server.backend().Corrupt([](const Attention& a) {
    StoreElement(a.o.data, a.problem.dtype, 0, std::numeric_limits<float>::quiet_NaN());
  });
  v1::AttendRequest request = test::PlainWireProblem(1, 11).request;
  request.set_check(true);
  request.set_dropout_p(0.25f);
  request.set_dropout_seed(uint64_t{1} << 63);
  request.mutable_bias()->set_dtype(v1::DTYPE_BIT);
  for (const int64_t dim : {1, 2, 1, 11}) request.mutable_bias()->add_shape(dim);
  request.add_raw("\x7f\x05\x7e\x03");
  v1::AttendResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(server.Stub()->Attend(&context, request, &response).ok());
  ASSERT_EQ(directory.entries().size(), 1u);
  EXPECT_EQ(fs::status(directory.entries()[0]).permissions(), fs::perms::owner_all);
  v1::AttendRequest again;
  ASSERT_TRUE(again.ParseFromString(ReadFile(directory.entries()[0] / "request.binpb")));
  EXPECT_EQ(again.dropout_p(), request.dropout_p());
  EXPECT_EQ(again.dropout_seed(), request.dropout_seed());
  EXPECT_EQ(again.bias().dtype(), v1::DTYPE_BIT);
  EXPECT_EQ(again.bias().byte_length(), 4u);
  EXPECT_TRUE(std::ranges::equal(again.bias().shape(), request.bias().shape()));
  EXPECT_TRUE(std::ranges::equal(again.raw(), request.raw()));
}

TEST(DumpTest, TheNumberOfDumpsIsBoundedAndWriteFailuresAreHarmless) {
  const TemporaryDirectory directory;
  const auto run = [](const std::string& dump_directory) {
    test::TestServer server([&](Config& config) {
      config.check_dump_dir = dump_directory;
      config.check_dump_max = 2;
      config.check_dump_interval_seconds = 0;
    });
    server.backend().Corrupt([](const Attention& a) {
      StoreElement(a.o.data, a.problem.dtype, 0, std::numeric_limits<float>::quiet_NaN());
    });
    for (int i = 0; i < 4; ++i) {
      WireProblem problem = test::PlainWireProblem(i);
      problem.request.set_check(true);
      v1::AttendResponse response;
      grpc::ClientContext context;
      EXPECT_TRUE(server.Stub()->Attend(&context, problem.request, &response).ok());
      EXPECT_FALSE(response.check().ok());
    }
    return server.log();
  };
  EXPECT_NE(run(directory.path().string()).find("check dump left out"), std::string::npos);
  EXPECT_EQ(directory.entries().size(), 2u);
  EXPECT_NE(run("/proc/nonexistent").find("check dump failed"), std::string::npos);
}

// A request with a single element whose check has failed.
class FailedRequest {
 public:
  explicit FailedRequest(uint64_t id) {
    Attention& a = request_.attention;
    a.problem.batch = a.problem.heads_q = a.problem.heads_kv = 1;
    a.problem.len_q = a.problem.len_k = a.problem.dim = a.problem.dim_v = 1;
    a.q.data = a.k.data = a.v.data = &one_;
    a.o.data = &one_;
    request_.id = id;
    request_.request_id = "the same";
    request_.report.emplace();
  }
  Request* operator->() { return &request_; }
  const Request& operator*() const { return request_; }

 private:
  float one_ = 1;
  Request request_;
};

class DumperTest : public ::testing::Test {
 protected:
  Dumper Make(int64_t dumps_max, Duration interval) {
    return Dumper({directory_.path().string(), dumps_max, interval, 1}, clock_, logger_);
  }
  size_t dumps() const { return directory_.entries().size(); }

  TemporaryDirectory directory_;
  test::ManualClock clock_;
  Logger logger_{{}, std::make_shared<spdlog::sinks::null_sink_mt>()};
};

TEST_F(DumperTest, DumpsWithTheSameMillisecondAndIdAreAllKept) {
  constexpr int kThreads = 8, kEach = 20;
  Dumper dumper = Make(1000, Duration::zero());
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&dumper, t] {
      for (int i = 0; i < kEach; ++i) dumper.Write(*FailedRequest(t * kEach + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(dumps(), kThreads * kEach);
  for (const fs::path& entry : directory_.entries()) {
    EXPECT_TRUE(fs::exists(entry / "report.json")) << entry;
  }
}

TEST_F(DumperTest, EachKindIsDumpedOncePerInterval) {
  Dumper dumper = Make(100, std::chrono::minutes(1));
  FailedRequest request(1);
  dumper.Write(*request);
  dumper.Write(*request);
  EXPECT_EQ(dumps(), 1u);
  clock_.Advance(std::chrono::seconds(59));
  dumper.Write(*request);
  EXPECT_EQ(dumps(), 1u);
  // Other kinds are not delayed by it.
  request->transport = Transport::kChunked;
  dumper.Write(*request);
  EXPECT_EQ(dumps(), 2u);
  request->selection.kernel = KernelId::kCpuFlash;
  dumper.Write(*request);
  EXPECT_EQ(dumps(), 3u);
  clock_.Advance(std::chrono::seconds(1));
  request->transport = Transport::kInline;
  request->selection.kernel = KernelId::kCpuReference;
  dumper.Write(*request);
  EXPECT_EQ(dumps(), 4u);
}

TEST_F(DumperTest, SharedMemoryLeavesHalfOfTheDumpsToOthers) {
  Dumper dumper = Make(5, Duration::zero());
  FailedRequest shared(1), other(2);
  shared->transport = Transport::kSharedMemory;
  for (int i = 0; i < 10; ++i) dumper.Write(*shared);
  EXPECT_EQ(dumps(), 3u);
  for (int i = 0; i < 10; ++i) dumper.Write(*other);
  EXPECT_EQ(dumps(), 5u);
}

}  // namespace
}  // namespace attend
