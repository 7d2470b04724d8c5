// SPDX-License-Identifier: Apache-2.0
//
// Settings from flags, environment and file, tested through the function and through the binary.

#include "server/app/config.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/memory/host_memory.h"
#include "server/util/byte_size.h"
#include "tests/server/support/config_settings.h"
#include "tests/server/support/parsed_config.h"

namespace attend {
namespace {

using test::ParsedConfig;
using test::ParseFlags;
using test::Setting;
using test::Settings;

// Sets an environment variable for the duration of a test.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedEnv() { unsetenv(name_); }

 private:
  const char* const name_;
};

std::string EnvName(const Setting& setting) {
  if (!setting.variable.empty()) return setting.variable;
  std::string name = "ATTEND_" + setting.flag;
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

std::string TemporaryFile(const std::string& content) {
  const std::string path = ::testing::TempDir() + "attend_config_" + std::to_string(getpid());
  std::ofstream(path) << content;
  return path;
}

TEST(ConfigTest, DefaultsApplyWhenNothingIsSet) {
  const ParsedConfig parsed = ParseFlags({});
  ASSERT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
  EXPECT_EQ(parsed.config.listen, std::vector<std::string>{"127.0.0.1:8001"});
  EXPECT_EQ(parsed.config.metrics_listen, "127.0.0.1:8002");
  const int64_t budget = DefaultMemoryBudget(ProcessMemoryLimit().bytes);
  EXPECT_EQ(parsed.config.memory_budget_bytes, budget);
  EXPECT_EQ(parsed.config.message_memory_max_bytes, std::max(budget, int64_t{4} << 30));
  EXPECT_EQ(parsed.config.check_sample, 0);
  EXPECT_TRUE(parsed.config.allocator_tuning);
}

TEST(ConfigTest, EverySettingIsReadFromFlagEnvironmentAndFile) {
  for (const Setting& setting : Settings()) {
    SCOPED_TRACE(setting.flag);
    EXPECT_FALSE(setting.holds(Config())) << "the test's value is the default";
    const auto parse = [&](std::vector<std::string> arguments) {
      arguments.insert(arguments.end(), setting.beside.begin(), setting.beside.end());
      return ParseFlags(std::move(arguments));
    };
    const ParsedConfig flag = parse({"--" + setting.flag, setting.text});
    EXPECT_EQ(flag.outcome, ConfigOutcome::kRun) << flag.text;
    EXPECT_TRUE(setting.holds(flag.config));
    {
      const std::string name = EnvName(setting);
      const ScopedEnv env(name.c_str(), setting.text.c_str());
      const ParsedConfig parsed = parse({});
      EXPECT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
      EXPECT_TRUE(setting.holds(parsed.config));
    }
    const std::string value = setting.flag == "listen"   ? "[\"127.0.0.1:9\", \"unix:/tmp/s\"]"
                              : setting.flag == "tenant" ? "[\"a=2\", \"default=3\"]"
                                                         : "\"" + setting.text + "\"";
    const std::string path = TemporaryFile(setting.flag + " = " + value + "\n");
    const ParsedConfig file = parse({"--config", path});
    EXPECT_EQ(file.outcome, ConfigOutcome::kRun) << file.text;
    EXPECT_TRUE(setting.holds(file.config));
    std::remove(path.c_str());
  }
}

TEST(ConfigTest, ABadValueIsOneLineThatNamesTheFlag) {
  for (const Setting& setting : Settings()) {
    if (setting.bad.empty()) continue;
    SCOPED_TRACE(setting.flag);
    const ParsedConfig parsed = ParseFlags({"--" + setting.flag + "=" + setting.bad});
    EXPECT_EQ(parsed.outcome, ConfigOutcome::kError);
    EXPECT_NE(parsed.text.find("--" + setting.flag), std::string::npos) << parsed.text;
    EXPECT_NE(parsed.text.find(setting.bad), std::string::npos) << parsed.text;
    EXPECT_EQ(parsed.text.find('\n'), parsed.text.size() - 1) << parsed.text;
  }
}

TEST(ConfigTest, TheClientsTlsVariablesAreIgnored) {
  const ScopedEnv cert("ATTEND_TLS_CERT", "/client.pem");
  const ScopedEnv key("ATTEND_TLS_KEY", "/client.key");
  const ParsedConfig parsed = ParseFlags({});
  EXPECT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
  EXPECT_EQ(parsed.config.tls_cert, "");
  EXPECT_EQ(parsed.config.tls_key, "");
}

TEST(ConfigTest, FlagsWinOverFileOverEnvironment) {
  const ScopedEnv env("ATTEND_MAX_QUEUE", "1");
  const ScopedEnv other("ATTEND_LANES", "1");
  const std::string path = TemporaryFile("max-queue = 2\nlanes = 2\nmax-streams = 2\n");
  const ParsedConfig parsed = ParseFlags({"--config", path, "--max-queue", "3"});
  EXPECT_EQ(parsed.config.max_queue, 3);
  EXPECT_EQ(parsed.config.lanes, 2);
  EXPECT_EQ(parsed.config.max_streams, 2);
  const ScopedEnv file("ATTEND_CONFIG", path.c_str());
  EXPECT_EQ(ParseFlags({}).config.max_streams, 2);
  std::remove(path.c_str());
}

TEST(ConfigTest, SwitchesHaveDefaultsAndCanBeSet) {
  EXPECT_FALSE(ParseFlags({}).config.shared_memory);
  EXPECT_TRUE(ParseFlags({"--shared-memory"}).config.shared_memory);
  EXPECT_FALSE(ParseFlags({"--shared-memory"}).config.shared_memory_any_user);
  EXPECT_TRUE(ParseFlags({"--shared-memory-any-user"}).config.shared_memory_any_user);
  EXPECT_EQ(ParseFlags({"--shared-memory=maybe"}).outcome, ConfigOutcome::kError);
  const ScopedEnv shared("ATTEND_SHARED_MEMORY", "true");
  EXPECT_TRUE(ParseFlags({}).config.shared_memory);
  EXPECT_FALSE(ParseFlags({"--no-reflection"}).config.reflection);
  EXPECT_TRUE(ParseFlags({}).config.reflection);
  EXPECT_FALSE(ParseFlags({}).config.core_dumps);
  EXPECT_TRUE(ParseFlags({"--core-dumps"}).config.core_dumps);
  EXPECT_FALSE(ParseFlags({"--no-allocator-tuning"}).config.allocator_tuning);
  EXPECT_TRUE(ParseFlags({"--allocator-tuning"}).config.allocator_tuning);
  const ScopedEnv env("ATTEND_ALLOCATOR_TUNING", "false");
  EXPECT_FALSE(ParseFlags({}).config.allocator_tuning);
}

TEST(ConfigTest, ABadCollectorAddressIsRefused) {
  for (const char* good : {"https://collector:4317", "h:1", "[::1]:4317", "unix:/run/otel"}) {
    EXPECT_EQ(ParseFlags({"--otlp-endpoint", good}).config.otlp_endpoint, good);
  }
  EXPECT_EQ(ParseFlags({"--otlp-endpoint", "http://h:4317"}).config.otlp_endpoint, "h:4317");
  EXPECT_EQ(ParseFlags({"--otlp-endpoint", ""}).config.otlp_endpoint, "");
  for (const char* bad : {"h", "h:0", "https://h", "https://unix:/x", "unix:/x?tenant=a",
                          "grpc://h:1", "https://h:1/v1/traces"}) {
    EXPECT_EQ(ParseFlags({"--otlp-endpoint", bad}).outcome, ConfigOutcome::kError) << bad;
  }
  const ParsedConfig tls = ParseFlags({"--otlp-endpoint=https://h:1", "--otlp-tls-ca=/ca",
                                       "--otlp-tls-cert=/cert", "--otlp-tls-key=/key"});
  EXPECT_EQ(tls.outcome, ConfigOutcome::kRun) << tls.text;
  EXPECT_EQ(tls.config.otlp_tls_ca + tls.config.otlp_tls_cert + tls.config.otlp_tls_key,
            "/ca/cert/key");
  EXPECT_NE(
      ParseFlags({"--otlp-endpoint=h:1", "--otlp-tls-ca=/ca"}).text.find("begins with https://"),
      std::string::npos);
  EXPECT_NE(
      ParseFlags({"--otlp-endpoint=https://h:1", "--otlp-tls-cert=/c"}).text.find("needs --otlp-"),
      std::string::npos);
  EXPECT_NE(
      ParseFlags({"--otlp-endpoint=https://h:1", "--otlp-tls-key=/k"}).text.find("needs --otlp-"),
      std::string::npos);
}

TEST(ConfigTest, UnknownFlagsKeysAndFilesAreErrors) {
  EXPECT_EQ(ParseFlags({"--bogus"}).outcome, ConfigOutcome::kError);
  EXPECT_EQ(ParseFlags({"stray"}).outcome, ConfigOutcome::kError);
  EXPECT_EQ(ParseFlags({"--config", "/nonexistent/file"}).outcome, ConfigOutcome::kError);
  const std::string path = TemporaryFile("bogus = 1\n");
  const ParsedConfig parsed = ParseFlags({"--config", path});
  EXPECT_EQ(parsed.outcome, ConfigOutcome::kError);
  const std::string line = "attend-server: --config " + path +
                           ": \"bogus\" is not a setting (see attend-server --help)\n";
  EXPECT_EQ(parsed.text, line);
  const ScopedEnv env("ATTEND_CONFIG", path.c_str());
  EXPECT_EQ(ParseFlags({}).text, line);
  std::ofstream(path) << "max-queue = 1\n[limits]\nmax-queue = 2\n";
  EXPECT_NE(ParseFlags({}).text.find("settings must not be in a section such as [limits]"),
            std::string::npos)
      << ParseFlags({}).text;
  std::remove(path.c_str());
}

TEST(ConfigTest, TenantsAreListedOneByOneAndNotTwice) {
  const ParsedConfig parsed = ParseFlags({"--tenant", "a=2", "--tenant", "b=5"});
  ASSERT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
  EXPECT_EQ(parsed.config.tenants.weights(), (std::vector<int32_t>{1, 2, 5}));
  for (const char* bad : {"a=1,a=2", "a", "=1", "a b=1", "a=1001", ""}) {
    const ParsedConfig refused = ParseFlags({"--tenant=" + std::string(bad)});
    EXPECT_EQ(refused.outcome, ConfigOutcome::kError) << bad;
    EXPECT_NE(refused.text.find("--tenant"), std::string::npos) << refused.text;
    EXPECT_EQ(refused.text.find('\n'), refused.text.size() - 1) << refused.text;
  }
}

TEST(ConfigTest, WithTokensDefaultHasNoWeightUnlessGiven) {
  const auto weights = [](const char* tenants) {
    const ParsedConfig parsed = ParseFlags({"--tenant", tenants, "--tokens", "tokens"});
    EXPECT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
    return parsed.config.tenants.weights();
  };
  EXPECT_EQ(weights("a=2,b=5"), (std::vector<int32_t>{0, 2, 5}));
  EXPECT_EQ(weights("a=2,default=3"), (std::vector<int32_t>{3, 2}));
  EXPECT_EQ(ParseFlags({"--tokens", "tokens"}).config.tenants.weights(), std::vector<int32_t>{1});
}

TEST(ConfigTest, MessageMemoryFitsSeveralMessages) {
  EXPECT_EQ(ParseFlags({"--message-memory-max", "0"}).config.message_memory_max_bytes, 0);
  const ParsedConfig few =
      ParseFlags({"--max-request-bytes", "1MiB", "--message-memory-max", "4MiB"});
  EXPECT_EQ(few.outcome, ConfigOutcome::kRun) << few.text;
  const ParsedConfig less =
      ParseFlags({"--max-request-bytes", "1MiB", "--message-memory-max", "4194303B"});
  EXPECT_EQ(less.outcome, ConfigOutcome::kError);
  EXPECT_NE(less.text.find("at least four times --max-request-bytes, 1MiB"), std::string::npos)
      << less.text;
}

TEST(ConfigTest, MemoryDefaultsFollowTheHost) {
  EXPECT_EQ(DefaultMemoryBudget(int64_t{1} << 40), int64_t{4} << 30);
  EXPECT_EQ(DefaultMemoryBudget((int64_t{2} << 30) + 5), int64_t{512} << 20);
  const ParsedConfig small = ParseFlags({"--memory-budget", "8MiB", "--max-request-bytes", "4MiB"});
  EXPECT_EQ(small.config.message_memory_max_bytes, 16 << 20);
  const ParsedConfig much = ParseFlags({"--memory-budget", "1000TiB"});
  EXPECT_EQ(much.outcome, ConfigOutcome::kError);
  EXPECT_NE(much.text.find("--memory-budget: 1000TiB exceeds the memory of "), std::string::npos)
      << much.text;
}

TEST(HostMemoryTest, TheLowestBoundApplies) {
  const std::filesystem::path root =
      ::testing::TempDir() + "attend_memory_" + std::to_string(getpid());
  const auto write = [&root](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  const int64_t machine = ProcessMemoryLimit(root).bytes;
  EXPECT_GT(machine, 0);
  EXPECT_EQ(ProcessMemoryLimit(root).whose, "the machine");
  write("proc/self/cgroup", "3:cpu,memory:/a/b\n0::/c/d\n");
  write("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(ProcessMemoryLimit(root).bytes, machine);
  write("sys/fs/cgroup/c/memory.max", "300000\n");
  EXPECT_EQ(ProcessMemoryLimit(root).bytes, 300000);
  EXPECT_EQ(ProcessMemoryLimit(root).whose, "the cgroup " + root.string() + "/sys/fs/cgroup/c");
  write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(ProcessMemoryLimit(root).bytes, 300000);
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "200000\n");
  EXPECT_EQ(ProcessMemoryLimit(root).bytes, 200000);
  std::filesystem::remove_all(root);
}

TEST(ConfigTest, ABadDeviceListIsRefused) {
  for (const char* good : {"auto", "cpu", "cuda:all", "cuda:3", "cuda:0,cuda:2", "cpu,cuda:0"}) {
    EXPECT_EQ(ParseFlags({"--device", good}).outcome, ConfigOutcome::kRun) << good;
  }
  for (const char* bad : {"", "cuda", "cuda:", "cuda:x", "cuda:0,0", "auto,cpu", "cpu,", "0"}) {
    EXPECT_EQ(ParseFlags({"--device=" + std::string(bad)}).outcome, ConfigOutcome::kError) << bad;
  }
}

TEST(ConfigTest, HelpExplainsEverySetting) {
  const ParsedConfig help = ParseFlags({"--help"});
  EXPECT_EQ(help.outcome, ConfigOutcome::kPrinted);
  for (const Setting& setting : Settings()) {
    EXPECT_NE(help.text.find("--" + setting.flag + " "), std::string::npos) << setting.flag;
    EXPECT_NE(help.text.find("[$" + EnvName(setting) + "]"), std::string::npos) << setting.flag;
  }
  for (const char* part : {"Network:", "Devices:", "Limits:", "[4GiB]", "[30]", "SECONDS"}) {
    EXPECT_NE(help.text.find(part), std::string::npos) << part;
  }
  EXPECT_NE(help.text.find("--allocator-tuning,--no-allocator-tuning\n"), std::string::npos);
  EXPECT_EQ(help.text.find('{'), help.text.find("{\"pid\"")) << "names CLI11's marks";
  const ParsedConfig version = ParseFlags({"--version"});
  EXPECT_EQ(version.outcome, ConfigOutcome::kPrinted);
  EXPECT_EQ(version.text, VersionText() + "\n");
}

TEST(ConfigTest, ARemovedSettingNamesItsReplacement) {
  const std::pair<const char*, const char*> gone[] = {
      {"--split-gflop", "a request runs on one GPU"},
      {"--grpc-memory-max", "--message-memory-max"},
      {"--server-transport", "there is one transport"}};
  for (const auto& [flag, instead] : gone) {
    const ParsedConfig removed = ParseFlags({flag, "0"});
    EXPECT_EQ(removed.outcome, ConfigOutcome::kError);
    EXPECT_NE(removed.text.find(std::string(flag) + ": was removed: " + instead), std::string::npos)
        << removed.text;
    EXPECT_EQ(ParseFlags({"--help"}).text.find(flag), std::string::npos);
  }
}

TEST(ByteSizeTest, RoundTrips) {
  EXPECT_EQ(*ParseByteSize("0"), 0);
  EXPECT_EQ(*ParseByteSize("1b"), 1);
  EXPECT_EQ(*ParseByteSize("2k"), 2048);
  EXPECT_EQ(*ParseByteSize("2 MB"), 2 << 20);
  EXPECT_EQ(*ParseByteSize("0.5GiB"), 1 << 29);
  for (const char* bad : {"", "x", "-1", "1XiB", "1 2", "inf", "1e300", "9000000TiB"}) {
    EXPECT_FALSE(ParseByteSize(bad).ok()) << bad;
  }
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{1024},
                              int64_t{5} << 30, (int64_t{1} << 50) + 1}) {
    EXPECT_EQ(*ParseByteSize(FormatByteSize(bytes)), bytes);
  }
  EXPECT_EQ(FormatByteSize(65536), "64KiB");
}

// Runs the binary. Returns its exit code and its output to `stream` (1 or 2).
std::pair<int, std::string> RunBinary(const std::string& arguments, int stream) {
  const std::string redirect = stream == 1 ? " 2>/dev/null" : " 2>&1 >/dev/null";
  FILE* pipe = popen((std::string(ATTEND_SERVER_BINARY) + " " + arguments + redirect).c_str(), "r");
  std::string text;
  char buffer[1024];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, got);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

TEST(BinaryTest, ExitCodesTellErrorsFromHelp) {
  EXPECT_EQ(RunBinary("--version", 1), std::pair(0, VersionText() + "\n"));
  EXPECT_EQ(RunBinary("--help", 1).first, 0);
  const auto [code, line] = RunBinary("--max-queue none", 2);
  EXPECT_EQ(code, 2);
  EXPECT_EQ(line.find('\n'), line.size() - 1) << line;
  EXPECT_NE(line.find("--max-queue"), std::string::npos) << line;
  EXPECT_EQ(RunBinary("--device cuda:999", 2).first, 1);
  EXPECT_EQ(RunBinary("--log-file /proc/nonexistent/log", 2).first, 1);
}

}  // namespace
}  // namespace attend
