// SPDX-License-Identifier: Apache-2.0
//
// The program itself: exit codes, messages, input and output files, the interrupt.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "client/tool/file_io.h"
#include "client/tool/npy.h"
#include "client/tool/safetensors.h"
#include "tests/client/support/fake_server.h"
#include "tests/client/support/program.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

TEST(Cli, HelpAndVersionExitWithZero) {
  for (const char* command : {"info", "run", "check", "load", "replay"}) {
    const Ended ended = RunProgram({command, "--help"});
    EXPECT_EQ(ended.exit_code, 0);
    EXPECT_THAT(ended.out, HasSubstr("Usage"));
  }
  EXPECT_EQ(RunProgram({"--help"}).exit_code, 0);
  const Ended version = RunProgram({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, HasSubstr("attend-client "));
}

TEST(Cli, BadFlagsAreOneLineAndExitCodeTwo) {
  for (const std::vector<std::string>& args :
       std::vector<std::vector<std::string>>{{},
                                             {"bogus"},
                                             {"info", "--bogus"},
                                             {"info", "--connections", "0"},
                                             {"info", "--timeout-s", "soon"},
                                             {"run"},
                                             {"run", "--q", "/nonexistent.npy"},
                                             {"run", "--layout", "hbld"},
                                             {"run", "--priority", "101"},
                                             {"run", "--safetensors", "/nonexistent.safetensors"},
                                             {"check", "--dtype", "int8"},
                                             {"check", "--shape", "Q7"},
                                             {"load", "--shape", "B1,colour=red"},
                                             {"load", "--rate", "-1"},
                                             {"load", "--verify", "1.5"},
                                             {"load", "--arrivals", "bursty"},
                                             {"load", "--mix", "/nonexistent.json"},
                                             {"load", "--allow", "SOMETIMES"},
                                             {"load", "--stream", "--deadline-ms", "5"},
                                             {"load", "--transport", "cuda-ipc", "--check", "1"},
                                             {"run", "--transport", "cuda"},
                                             {"load", "--search-p99", "5", "--count", "5"},
                                             {"run", "--tenant", "a\tb"},
                                             {"check", "--tenant", std::string(257, 'a')},
                                             {"replay"},
                                             {"replay", "/nonexistent"}}) {
    const Ended ended = RunProgram(args);
    const std::string all = ::testing::PrintToString(args);
    EXPECT_EQ(ended.exit_code, 2) << all;
    EXPECT_THAT(ended.err, ::testing::StartsWith("attend-client: ")) << all;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << all << ended.err;
    EXPECT_EQ(ended.out, "") << all;
  }
}

TEST(Cli, AMissingServerIsExitCodeOne) {
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"info"}, {"check", "--quick"}, {"load", "--count", "1"}}) {
    std::vector<std::string> all = args;
    all.insert(all.end(), {"--server", "127.0.0.1:1"});
    const Ended ended = RunProgram(all);
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_THAT(ended.err, HasSubstr("UNAVAILABLE: no server at 127.0.0.1:1: is attend-server "
                                     "running?"));
  }
  EXPECT_THAT(RunProgram({"info", "--health", "-s", "[::1]:1"}).err,
              HasSubstr("no server at [::1]:1: is"));
  EXPECT_THAT(RunProgram({"info", "--health", "-s", "unix:" + Path("nosuch.sock")}).err,
              HasSubstr("no server at unix:" + Path("nosuch.sock") + ": is"));
}

TEST(Cli, TheServerCanComeFromTheEnvironment) {
  FakeServer server;
  setenv("ATTEND_SERVER", server.address().c_str(), 1);
  const Ended text = RunProgram({"info"});
  const Ended json = RunProgram({"info", "--json"});
  unsetenv("ATTEND_SERVER");
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("attend fake"));
  EXPECT_THAT(text.out, HasSubstr("SERVING"));
  EXPECT_EQ(nlohmann::json::parse(json.out)["version"], "fake");
}

TEST(Cli, RunReadsAndWritesNpy) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    ASSERT_TRUE(WriteNpy(Path("q.npy"), Random4(dtype, {1, 4, 9, 16}, seed)).ok());
    ASSERT_TRUE(WriteNpy(Path("k.npy"), Random4(dtype, {1, 2, 9, 16}, seed + 1)).ok());
    ASSERT_TRUE(WriteNpy(Path("v.npy"), Random4(dtype, {1, 2, 9, 8}, seed + 2)).ok());
    const Ended ended = RunProgram({"--server",      server.address(),
                                    "run",           "--q",
                                    Path("q.npy"),   "--k",
                                    Path("k.npy"),   "--v",
                                    Path("v.npy"),   "--causal",
                                    "--window-left", "4",
                                    "--softcap",     "20",
                                    "--sinks",       "1,2,3,4",
                                    "--check",       "--verify",
                                    "--out",         Path("o.npy"),
                                    "--lse-out",     Path("lse.npy"),
                                    "--request-id",  "cli"});
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_THAT(ended.out, HasSubstr("[1, 4, 9, 8]"));
    EXPECT_THAT(ended.out, HasSubstr("server check ok"));
    EXPECT_THAT(ended.out, HasSubstr("client check ok"));
    EXPECT_EQ(std::count(ended.out.begin(), ended.out.end(), '\n'), 1);
    const Result<HostTensor> o = ReadNpy(Path("o.npy"));
    ASSERT_TRUE(o.ok()) << o.status().ToString();
    EXPECT_EQ(o->dtype, dtype);
    EXPECT_EQ(ShapeText(o->shape), "[1, 4, 9, 8]");
    EXPECT_EQ(ShapeText(ReadNpy(Path("lse.npy"))->shape), "[1, 4, 9]");
  }
}

TEST(Cli, RunReadsAndWritesSafetensors) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  const std::map<std::string, HostTensor> tensors = {
      {"q", Random4(DType::kBFloat16, {9, 4, 16}, seed)},
      {"k", Random4(DType::kBFloat16, {11, 2, 16}, seed + 1)},
      {"v", Random4(DType::kBFloat16, {11, 2, 16}, seed + 2)},
      {"bias", Random4(DType::kFloat32, {1, 4, 1, 6}, seed + 3)}};
  ASSERT_TRUE(WriteSafetensors(Path("in.safetensors"), tensors).ok());
  const std::vector<std::string> args = {
      "run",      "--server",     server.address(), "--safetensors", Path("in.safetensors"),
      "--layout", "lhd",          "--cu-q",         "0,4,9",         "--cu-kv",
      "0,6,11",   "--return-lse", "--verify",       "--out"};
  std::vector<std::string> good = args;
  good.push_back(Path("o.safetensors"));
  const Ended ended = RunProgram(good);
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const auto out = ReadSafetensors(Path("o.safetensors"), {"o", "lse"});
  ASSERT_TRUE(out.ok()) << out.status().ToString();
  EXPECT_EQ(out->at("o").dtype, DType::kBFloat16);
  EXPECT_EQ(ShapeText(out->at("o").shape), "[9, 4, 16]");
  EXPECT_EQ(ShapeText(out->at("lse").shape), "[4, 9]");
  std::vector<std::string> bad = args;
  bad.push_back(Path("o.npy"));
  const Ended refused = RunProgram(bad);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("bfloat16"));
}

TEST(Cli, RunPrintsTheServersRefusal) {
  FakeServer server;
  server.SetBefore([](int64_t, grpc::ServerContext*) {
    return grpc::Status(grpc::INVALID_ARGUMENT, "q: head dim D is 300");
  });
  const HostTensor tensor = Random4(DType::kFloat32, {1, 1, 2, 4}, 1);
  ASSERT_TRUE(WriteNpy(Path("q.npy"), tensor).ok());
  const Ended ended = RunProgram({"run", "--server", server.address(), "--q", Path("q.npy"), "--k",
                                  Path("q.npy"), "--v", Path("q.npy")});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_THAT(ended.err, HasSubstr("INVALID_ARGUMENT: q: head dim D is 300"));
}

TEST(Cli, CheckDetectsAWrongAnswer) {
  FakeServer server;
  const std::vector<std::string> args = {"check",   "--server", server.address(),
                                         "--quick", "--seed",   "5"};
  const Ended good = RunProgram(args);
  EXPECT_EQ(good.exit_code, 0) << good.out;
  EXPECT_THAT(good.out, HasSubstr("27 of 27 passed"));
  server.SetAfter([](v1::AttendResponse* response) {
    if (response->o().dtype() == v1::DTYPE_FLOAT32) (*response->mutable_raw(0))[3] = '\x7f';
  });
  const Ended bad = RunProgram(args);
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.out, HasSubstr("18 of 27 passed"));
  EXPECT_THAT(bad.out, HasSubstr("FAILED"));
}

TEST(Cli, SendsTheTenant) {
  FakeServer server;
  std::mutex mutex;
  std::set<std::string> named;
  server.SetBefore([&](int64_t, grpc::ServerContext* context) {
    const auto found = context->client_metadata().find("x-attend-tenant");
    const std::lock_guard lock(mutex);
    if (found != context->client_metadata().end()) {
      named.emplace(found->second.data(), found->second.size());
    }
    return grpc::Status::OK;
  });
  ASSERT_TRUE(WriteNpy(Path("t.npy"), Random4(DType::kFloat32, {1, 1, 2, 4}, 1)).ok());
  const std::string t = Path("t.npy");
  for (std::vector<std::string> args : std::vector<std::vector<std::string>>{
           {"run", "--q", t, "--k", t, "--v", t, "--tenant", "run"},
           {"check", "--shape", "B1,H1,L2,D4", "--tenant", "check"},
           {"load", "--shape", "B1,H1,L2,D4", "--count", "1", "--warmup", "0", "--tenant", "load"},
           {"load", "--shape", "B1,H1,L2,D4", "--count", "1", "--warmup", "0", "--tenant", "stream",
            "--stream"}}) {
    args.insert(args.end(), {"--server", server.address()});
    const Ended ended = RunProgram(args);
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
  }
  EXPECT_EQ(named, (std::set<std::string>{"run", "check", "load", "stream"}));
}

TEST(Cli, LoadWritesItsReports) {
  FakeServer server;
  const Ended ended =
      RunProgram({"load", "--server", server.address(), "--shape", "B1,H1,L8,D8", "--shape",
                  "B1,H1,L9,D8,causal,weight=2", "--concurrency", "1,3", "--rate", "500", "--count",
                  "30", "--warmup", "0", "--verify", "1", "--json", Path("load.json")});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("closed x1"));
  EXPECT_THAT(ended.out, HasSubstr("closed x3"));
  EXPECT_THAT(ended.out, HasSubstr("open 500/s"));
  EXPECT_THAT(ended.out, HasSubstr("passed 30, FAILED 0"));
  const auto json = nlohmann::json::parse(*ReadWholeFile(Path("load.json")));
  EXPECT_EQ(json["steps"].size(), 3u);
  EXPECT_EQ(json["steps"][2]["client_verification"]["passed"], 30);
}

TEST(Cli, LoadFailsOnAWrongAnswer) {
  FakeServer server;
  server.SetAfter([](v1::AttendResponse* response) { (*response->mutable_raw(0))[3] = '\x7f'; });
  const Ended ended = RunProgram({"load", "--server", server.address(), "--shape", "B1,H1,L8,D8",
                                  "--count", "5", "--warmup", "0", "--verify", "1"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_THAT(ended.out, HasSubstr("FAILED 5"));
}

TEST(Cli, LoadSearchesForARate) {
  FakeServer server;
  const Ended ended =
      RunProgram({"load", "--server", server.address(), "--shape", "B1,H1,L8,D8", "--rate",
                  "1000000", "--duration", "0.05", "--warmup", "0", "--search-p99", "50",
                  "--search-precision", "0.5", "--quiet", "--grace", "20"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("p99"));
  EXPECT_THAT(ended.out, HasSubstr("highest rate with p99 from the intended send <= 50 ms"));
}

TEST(Cli, AnInterruptPrintsTheMeasurementsSoFar) {
  FakeServer server;
  Program program({"load", "--server", server.address(), "--shape", "B1,H1,L8,D8", "--duration",
                   "1000", "--warmup", "0"});
  while (server.calls() < 20) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  program.Interrupt();
  const Ended ended = program.Wait();
  EXPECT_EQ(ended.exit_code, 130) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("closed x1"));
  EXPECT_THAT(ended.out, HasSubstr("(interrupted)"));
}

TEST(Cli, ReplayResendsADump) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  const std::string dir = Path("dump");
  ASSERT_TRUE(mkdir(dir.c_str(), 0700) == 0 || errno == EEXIST);
  v1::AttendRequest request;
  request.set_request_id("dumped-1");
  for (const auto& [tensor, part] :
       {std::pair{request.mutable_q(), 0}, std::pair{request.mutable_k(), 1},
        std::pair{request.mutable_v(), 2}}) {
    const HostTensor values = Random4(DType::kFloat32, {1, 2, 5, 8}, seed + part);
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    tensor->mutable_shape()->Add(values.shape.begin(), values.shape.end());
    request.add_raw(values.data.get(), static_cast<size_t>(values.bytes));
  }
  v1::AttendResponse response;
  ASSERT_TRUE(Answer(request, &response).ok());
  const auto put = [&](const char* name, const std::string& bytes) {
    ASSERT_TRUE(
        WriteFile(dir + "/" + name, {{bytes.data(), static_cast<int64_t>(bytes.size())}}).ok());
  };
  put("request.binpb", request.SerializeAsString());
  put("response.binpb", response.SerializeAsString());
  put("report.json", R"({"id": "dumped-1", "kernel": "cpu_flash", "max_error": 0.5})");
  const Ended same = RunProgram({"replay", dir, "--server", server.address()});
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_THAT(same.out, HasSubstr("bitwise equal"));
  EXPECT_THAT(same.out, HasSubstr("dumped-1"));
  EXPECT_THAT(same.out, HasSubstr("not reproduced: this is the dumped answer"));
  (*response.mutable_raw(0))[7] ^= 1;
  put("response.binpb", response.SerializeAsString());
  const Ended other = RunProgram({"replay", dir, "--server", server.address()});
  EXPECT_EQ(other.exit_code, 0);
  EXPECT_THAT(other.out, HasSubstr("1 of 80 elements differ"));
  EXPECT_THAT(other.out, HasSubstr("not reproduced: the new answer passes"));
  server.SetAfter([](v1::AttendResponse* r) { (*r->mutable_raw(0))[3] = '\x7f'; });
  const Ended wrong = RunProgram({"replay", dir, "--server", server.address()});
  EXPECT_EQ(wrong.exit_code, 1) << "still wrong";
  EXPECT_THAT(wrong.out, HasSubstr("verdict  reproduced"));
  put("request.binpb", "not a message\xff\xff");
  const Ended bad = RunProgram({"replay", dir, "--server", server.address()});
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_THAT(bad.err, HasSubstr("request.binpb"));
}

}  // namespace
}  // namespace attend::client
