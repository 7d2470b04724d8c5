// SPDX-License-Identifier: Apache-2.0
//
// Wrong usage of the program: its messages, when they come, and the exit codes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "client/tool/npy.h"
#include "client/tool/safetensors.h"
#include "tests/client/support/fake_server.h"
#include "tests/client/support/program.h"

namespace attend::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string WriteInput(const char* name) {
  const std::string path = Path(name);
  EXPECT_TRUE(WriteNpy(path, Random4(DType::kFloat32, {1, 1, 2, 4}, 1)).ok());
  return path;
}

struct Case {
  std::vector<std::string> args;
  std::vector<std::string> words;
};

// Each is refused in one line that has the words.
void ExpectUsage(const std::vector<Case>& cases) {
  for (const auto& [args, words] : cases) {
    const Ended ended = RunProgram(args);
    const std::string all = ::testing::PrintToString(args);
    EXPECT_EQ(ended.exit_code, 2) << all << ended.err;
    for (const std::string& word : words) EXPECT_THAT(ended.err, HasSubstr(word)) << all;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << all << ended.err;
    EXPECT_EQ(ended.out, "") << all;
  }
}

TEST(CliUsage, EveryErrorIsOneLine) {
  const std::string npy = WriteInput("in.npy");
  const std::string st = Path("in.safetensors");
  ASSERT_TRUE(WriteSafetensors(st, {{"q", Random4(DType::kFloat32, {1, 1, 2, 4}, 1)}}).ok());
  const std::string folder = Path("");
  const std::vector<Case> cases = {
      {{}, {"info", "run", "check", "load", "replay", "--help"}},
      {{"admin"}, {"admin: a command is missing", "drain, undrain, log-level", "admin --help"}},
      {{"session"}, {"session: a command is missing", "create, append", "session --help"}},
      {{"lod"}, {"\"lod\", did you mean load?"}},
      {{"isnfo"}, {"\"isnfo\", did you mean info?"}},
      {{"session", "creat"}, {"session: ", "\"creat\", did you mean create?"}},
      {{"admin", "darin"}, {"admin: ", "\"darin\", did you mean drain?"}},
      {{"nothing-like-it"}, {"\"nothing-like-it\", see --help"}},
      {{"info", "--timeout", "abc"}, {"not expected: --timeout abc; see info --help"}},
      {{"info", "x\x1b[2Jy"}, {"not expected: x\\u001b[2Jy"}},
      {{"-s", "127.0.0.1:99999", "info"}, {"99999", "[1, 65535]"}},
      {{"-s", "http://127.0.0.1:8001", "info"}, {"without http://"}},
      {{"-s", "http://127.0.0.1:8001", "load"}, {"without http://"}},
      {{"load", "--deadline-share", "0.5"}, {"--deadline-share", "--deadline-ms"}},
      {{"load", "--cancel-after-ms", "5"}, {"--cancel-after-ms", "--cancel-share"}},
      {{"load", "--search-precision", "0.1"}, {"--search-precision", "--search-p99"}},
      {{"load", "--json", "/nonexistent/x.json"}, {"/nonexistent/x.json"}},
      {{"load", "--csv", "x.csv"}, {": --csv: was removed: use --json FILE"}},
      {{"load", "--sessions", "2", "--csv"}, {"--csv: was removed: use --json FILE"}},
      {{"load", "--plot", "x.png"}, {"x.png", "must end in .svg"}},
      {{"load", "--json", folder}, {folder}},
      {{"run", "--q", npy, "--k", npy, "--v", npy, "--out", "o.txt"}, {"o.txt", ".npy"}},
      {{"run", "--q", npy, "--k", npy, "--v", npy, "--lse-out", "l"}, {"--lse-out l", ".npy"}},
      {{"run", "--q", npy, "--k", npy, "--v", npy, "--out", "/nonexistent/o.npy"},
       {"/nonexistent/o.npy"}},
      {{"run", "--safetensors", npy}, {npy, "not a .safetensors file"}},
      {{"run", "--q", st, "--k", st, "--v", st}, {st, "--safetensors"}},
      {{"load", "--concurrency", "8:1"}, {"--concurrency 8:1", "ends before it begins"}},
      {{"load", "--max-trials", "5"}, {"--max-trials", "--stable"}},
      {{"load", "--stable", "--count", "5"}, {"--stable", "--count"}},
      {{"load", "--context", "3"}, {"--context", "--sessions"}},
      {{"load", "--sessions", "2", "--rate", "3"}, {"--rate", "--sessions"}},
      {{"load", "--sessions", "2", "--transport", "shm"}, {"--sessions", "shm"}},
      {{"load", "--sessions", "0"}, {"--sessions"}},
      {{"session", "info", "12"}, {"12", "32 hexadecimal digits"}},
      {{"session", "append", std::string(32, '0')}, {"--k"}},
      {{"session", "attend", std::string(32, '0')}, {"--q"}},
      {{"session", "truncate", std::string(32, '0')}, {"--length"}},
      {{"session", "create", "--dtype", "float8"}, {"float8"}},
      {{"session", "fork"}, {"id"}},
      {{"session", "append", std::string(32, '0'), "--layout", "lhd"}, {"lhd"}},
      {{"check", "--shape", "B1,H8,L100000000,D64"}, {"L100000000", "GiB"}},
  };
  ExpectUsage(cases);
}

TEST(CliUsage, NumbersMustBeWhatTheirTextSays) {
  ExpectUsage({
      {{"run", "--dropout-seed", "-1"},
       {"--dropout-seed is -1, must be in [0, 18446744073709551615]"}},
      {{"check", "--seed", "18446744073709551616"},
       {"--seed is 18446744073709551616, must be in [0"}},
      {{"run", "--window-left", "9223372036854775808"},
       {"--window-left is", "9223372036854775807]"}},
      {{"run", "--q-lengths", "3,99999999999999999999"},
       {"--q-lengths is 99999999999999999999, mu"}},
      {{"run", "--softcap", "1e-50"}, {"--softcap is 1e-50, must be 0, or at least 1e-45"}},
      {{"run", "--deadline-ms", "nan"}, {"--deadline-ms is nan, must be in [0 - 1e+09]"}},
      {{"--keepalive-time", "nan", "info"}, {"--keepalive-time is nan, must be in [1 - 86400]"}},
  });
}

TEST(CliUsage, FilesMustHoldWhatTheyAreFor) {
  const std::string npy = WriteInput("in.npy");
  const std::string st = Path("o.safetensors");
  const std::string folder = Path("");
  ExpectUsage({
      {{"run", "--out", Path("o.npy"), "--lse-out", Path("o.npy"), "--q", npy, "--k", npy, "--v",
        npy},
       {"--out and --lse-out are both", "o.npy, must be two files"}},
      {{"run", "--out", st, "--lse-out", st, "--q", npy, "--k", npy, "--v", npy},
       {"both " + st + ", which holds the LSE without --lse-out"}},
      {{"--tls-ca", folder, "info"}, {"tls_ca " + folder, "Is a directory"}},
      {{"--tls-ca", "/dev/zero", "info"}, {"tls_ca /dev/zero has more than 16777216 bytes"}},
      {{"--token-file", "/dev/zero", "info"}, {"token file /dev/zero", "byte 0x00"}},
  });
}

TEST(CliUsage, AShapeTooLargeForAnyMachineIsRefusedWithItsBytes) {
  FakeServer server;
  for (const char* shape : {"B1,H8,L100000000,D64", "B1,H8,L1000000000000000000,D64"}) {
    const Ended ended = RunProgram({"load", "-s", server.address(), "--shape", shape});
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_THAT(ended.err, AllOf(HasSubstr(shape), HasSubstr("inputs"), HasSubstr("--pool")));
  }
  EXPECT_EQ(server.calls(), 0);
}

TEST(CliUsage, UnwritableReportsAreRefusedBeforeTheLoad) {
  FakeServer server;
  for (const char* file : {"--json=/nonexistent/report", "--plot=/nonexistent/report.svg"}) {
    const Ended ended =
        RunProgram({"load", "-s", server.address(), "--count", "1", "--warmup", "0", file});
    EXPECT_EQ(ended.exit_code, 2) << file;
  }
  EXPECT_EQ(server.calls() + server.infos(), 0);
}

TEST(CliUsage, RunReportsWhereItsAnswerWent) {
  FakeServer server;
  const std::string npy = WriteInput("t.npy");
  std::vector<std::string> args = {"run", "-s", server.address(), "--q", npy, "--k", npy,
                                   "--v", npy};
  EXPECT_THAT(RunProgram(args).out, AllOf(HasSubstr("not kept (no --out)"), Not(HasSubstr("lse"))));
  args.push_back("--return-lse");
  EXPECT_THAT(RunProgram(args).out, HasSubstr("lse [1, 1, 2] not kept (no --lse-out"));
  args.insert(args.end(), {"--out", Path("o.npy"), "--lse-out", Path("lse.npy")});
  EXPECT_THAT(RunProgram(args).out,
              AllOf(HasSubstr("in " + Path("o.npy")), HasSubstr("in " + Path("lse.npy"))));
}

TEST(CliUsage, AnUnknownTenantIsAWarning) {
  FakeServer server;
  server.SetTenants({"default", "team-a"});
  const std::string npy = WriteInput("t.npy");
  for (const char* tenant : {"team-a", "nosuch"}) {
    for (std::vector<std::string> args : std::vector<std::vector<std::string>>{
             {"run", "--q", npy, "--k", npy, "--v", npy},
             {"check", "--shape", "B1,H1,L2,D4"},
             {"load", "--shape", "B1,H1,L2,D4", "--count", "1", "--warmup", "0"}}) {
      args.insert(args.end(), {"-s", server.address(), "--tenant", tenant});
      const Ended ended = RunProgram(args);
      EXPECT_EQ(ended.exit_code, 0) << ended.err;
      if (tenant == std::string("team-a")) {
        EXPECT_EQ(ended.err, "");
      } else {
        EXPECT_THAT(ended.err, AllOf(HasSubstr("warning"), HasSubstr("\"nosuch\""),
                                     HasSubstr("default, team-a")));
      }
    }
  }
}

TEST(CliUsage, ASearchHasALowerBoundAndWritesItsResult) {
  FakeServer server;
  const auto search = [&](const char* p99_ms, const char* rate) {
    const Ended ended =
        RunProgram({"load", "-s", server.address(), "--shape", "B1,H1,L8,D8", "--duration", "0.1",
                    "--warmup", "0", "--json", Path("s.json"), "--quiet", "--search-p99", p99_ms,
                    "--rate", rate, "--search-precision", "0.5"});
    return std::pair(ended, nlohmann::json::parse(*ReadWholeFile(Path("s.json"))));
  };
  const auto [none, nothing] = search("0.001", "400");
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.out, HasSubstr("no rate measured has p99 <= 0.001 ms; the lowest, 100/s"));
  EXPECT_EQ(nothing["steps"].size(), 3u) << "400, 200, 100; at 50 a second 5 requests are due";
  EXPECT_EQ(nothing["search"]["p99_ms"], 0.001);
  EXPECT_TRUE(nothing["search"]["rate_per_s"].is_null());

  const auto [some, found] = search("60000", "100");
  EXPECT_EQ(some.exit_code, 0) << some.err;
  EXPECT_GE(found["search"]["rate_per_s"], 100);
}

TEST(CliUsage, InfoPrintsLimitsWithUnits) {
  FakeServer server;
  server.SetRequestBytesMax(int64_t{3} << 19);
  const Ended ended = RunProgram({"info", "-s", server.address()});
  EXPECT_THAT(ended.out, HasSubstr("a message 1.5 MiB"));
}

}  // namespace
}  // namespace attend::client
