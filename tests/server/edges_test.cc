// SPDX-License-Identifier: Apache-2.0
//
// The small parts at the server's edges: statuses, log lines, the copy pool, the allocator switch,
// dumps of failed checks.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "server/copy_pool.h"
#include "server/dump.h"
#include "server/grpc_status.h"
#include "server/logging.h"
#include "tests/server/messages.h"
#include "tests/server/test_server.h"

namespace attend {
namespace {

namespace fs = std::filesystem;
using test::WireProblem;

std::string ReadFile(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// A directory for one test, gone afterwards.
class TemporaryDirectory {
 public:
  TemporaryDirectory()
      : path_(fs::path(::testing::TempDir()) / ("attend_edges_" + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~TemporaryDirectory() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(path_)) all.push_back(entry.path());
    return all;
  }

 private:
  const fs::path path_;
};

TEST(GrpcStatusTest, EveryCodeThereAndBack) {
  EXPECT_TRUE(ToGrpc(Status()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status()).ok());
  for (const Code code :
       {Code::kCancelled, Code::kUnknown, Code::kInvalidArgument, Code::kDeadlineExceeded,
        Code::kNotFound, Code::kAlreadyExists, Code::kPermissionDenied, Code::kResourceExhausted,
        Code::kFailedPrecondition, Code::kUnimplemented, Code::kInternal, Code::kUnavailable}) {
    const grpc::Status there = ToGrpc(Status(code, "why"));
    EXPECT_EQ(static_cast<int>(there.error_code()), static_cast<int>(code));
    const Status back = FromGrpc(there);
    EXPECT_EQ(back.code(), code);
    EXPECT_EQ(back.message(), "why");
  }
  const Status foreign = FromGrpc(grpc::Status(grpc::StatusCode::ABORTED, "race"));
  EXPECT_EQ(foreign.code(), Code::kUnknown);
  EXPECT_NE(foreign.message().find("race"), std::string::npos);
}

TEST(GrpcStatusTest, LongMessagesAreCutBetweenCharacters) {
  EXPECT_EQ(CutMessage(std::string(1024, 'x')), std::string(1024, 'x'));
  EXPECT_EQ(CutMessage(std::string(1025, 'x')), std::string(1021, 'x') + "...");
  std::string umlauts;  // two bytes each, so that 1021 falls into one
  for (int i = 0; i < 600; ++i) umlauts += "\xc3\xa4";
  const std::string cut = CutMessage(umlauts);
  EXPECT_EQ(cut, umlauts.substr(0, 1020) + "...");
}

TEST(LoggingTest, JsonLinesAreValidWhateverTheText) {
  const TemporaryDirectory directory;
  const std::string hostile = "a\"b\\c\nd\x01\xff end";
  for (const char* format : {"json", "text"}) {
    Config config;
    config.log_file = (directory.path() / format).string();
    config.log_format = format;
    auto logger = MakeLogger(config);
    ASSERT_TRUE(logger.ok()) << logger.status().ToString();
    (*logger)->warn("request failed request_id={}", hostile);
    (*logger)->debug("below the level");
    (*logger)->flush();
    const std::string text = ReadFile(config.log_file);
    ASSERT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    EXPECT_EQ(text.find('\x01'), std::string::npos);
    if (config.log_format == "text") {
      EXPECT_NE(text.find(" warn request failed request_id=a\"b\\c\\x0ad\\x01"), std::string::npos)
          << text;
      continue;
    }
    const nlohmann::json line = nlohmann::json::parse(text);
    EXPECT_EQ(line["level"], "warn");
    EXPECT_TRUE(
        line["message"].get<std::string>().starts_with("request failed request_id=a\"b\\c\nd\x01"));
  }
  Config config;
  config.log_file = "/proc/nonexistent/log";
  EXPECT_FALSE(MakeLogger(config).ok());
}

TEST(CopyPoolTest, CopiesEveryByteOnceAndThenSaysSo) {
  std::mt19937_64 random(test::FreshSeed());
  for (const int threads : {1, 3}) {
    CopyPool pool(threads);
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'000}, size_t{9'000'001}}) {
      std::string from(bytes, '\0');
      for (size_t i = 0; i < bytes; i += 97) from[i] = static_cast<char>(random());
      std::string to(bytes, '\x5a');
      const test::Pieces pieces(from, random);
      SliceReader reader(pieces.spans());
      std::vector<CopyPiece> copy;
      reader.ReadPieces(to.data(), static_cast<int64_t>(bytes), copy);
      std::promise<void> done;
      pool.Copy(std::move(copy), [&done] { done.set_value(); });
      done.get_future().get();
      EXPECT_TRUE(to == from) << bytes;
    }
  }
}

TEST(DumpTest, AFailedCheckIsWrittenAndGivesTheSameRequestAgain) {
  const TemporaryDirectory directory;
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  test::TestServer server([&](Config& config) {
    config.reference_check = "all";
    config.check_sample = 1;
    config.check_dump_dir = directory.path().string();
    config.check_dump_max = 1 << 20;
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
    if (response.check().ok()) {  // no rows, or the fault did no harm
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
    EXPECT_TRUE(std::ranges::equal(again.raw(), problem.request.raw()));
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

TEST(DumpTest, TheNumberOfDumpsIsBoundedAndFailuresAreHarmless) {
  const TemporaryDirectory directory;
  const auto run = [](const std::string& dump_directory) {
    test::TestServer server([&](Config& config) {
      config.check_dump_dir = dump_directory;
      config.check_dump_max = 2;
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
  EXPECT_NE(run(directory.path().string()).find("check dump skipped"), std::string::npos);
  EXPECT_EQ(directory.entries().size(), 2u);
  EXPECT_NE(run("/proc/nonexistent").find("check dump failed"), std::string::npos);
}

}  // namespace
}  // namespace attend
