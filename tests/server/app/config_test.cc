// SPDX-License-Identifier: Apache-2.0
//
// Settings from flags, environment and file, through the function and through the binary.

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
#include <vector>

#include "server/memory/host_memory.h"
#include "server/util/byte_size.h"

namespace attend {
namespace {

struct Parsed {
  ConfigOutcome outcome;
  Config config;
  std::string text;
};

Parsed Parse(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"attend-server"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  Parsed out;
  out.outcome = ParseConfig(static_cast<int>(argv.size()), argv.data(), out.config, out.text);
  return out;
}

// An environment variable for the time of a test.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedEnv() { unsetenv(name_); }

 private:
  const char* const name_;
};

struct Setting {
  std::string flag;
  std::string text;  // as written
  std::function<bool(const Config&)> holds;
  std::string bad;  // a value that is refused; empty: all are taken
};

std::vector<Setting> ConnectionSettings() {
  using C = Config;
  return {
      {"max-connections", "70", [](const C& c) { return c.max_connections == 70; }, "-1"},
      {"max-connections-per-peer", "8", [](const C& c) { return c.max_connections_per_peer == 8; },
       "-1"},
      {"max-calls", "9", [](const C& c) { return c.max_calls == 9; }, "-1"},
      {"handshake-timeout", "1.5", [](const C& c) { return c.handshake_timeout_seconds == 1.5; },
       "0"},
      {"connection-idle-timeout", "2.5",
       [](const C& c) { return c.connection_idle_timeout_seconds == 2.5; }, "0"},
      {"keepalive-time", "3", [](const C& c) { return c.keepalive_time_seconds == 3; }, "0"},
      {"keepalive-timeout", "4", [](const C& c) { return c.keepalive_timeout_seconds == 4; }, "0"},
      {"socket-mode", "0666", [](const C& c) { return c.socket_mode == "0666"; }, "0400"},
      {"socket-group", "7", [](const C& c) { return c.socket_group == "7"; }, ""},
      {"tokens", "/etc/t", [](const C& c) { return c.tokens == "/etc/t"; }, ""},
  };
}

std::vector<Setting> MemorySettings() {
  using C = Config;
  return {
      {"listen", "127.0.0.1:9,unix:/tmp/s",
       [](const C& c) {
         return c.listen == std::vector<std::string>{"127.0.0.1:9", "unix:/tmp/s"};
       },
       "localhost"},
      {"metrics-listen", "off", [](const C& c) { return c.metrics_listen == "off"; }, "unix:/x"},
      {"max-calls-per-peer", "9", [](const C& c) { return c.max_calls_per_peer == 9; }, "-1"},
      {"max-streams", "7", [](const C& c) { return c.max_streams == 7; }, "0"},
      {"stream-requests-max", "9", [](const C& c) { return c.stream_requests_max == 9; }, "-1"},
      {"chunked-streams-max", "3", [](const C& c) { return c.chunked_streams_max == 3; }, "0"},
      {"chunked-idle-timeout", "2.5",
       [](const C& c) { return c.chunked_idle_timeout_seconds == 2.5; }, "0"},
      {"write-timeout", "1.5", [](const C& c) { return c.write_timeout_seconds == 1.5; }, "-1"},
      {"ready-file", "/tmp/r", [](const C& c) { return c.ready_file == "/tmp/r"; }, ""},
      {"device", "cuda:0,1", [](const C& c) { return c.device == "cuda:0,cuda:1"; }, "gpu"},
      {"lanes", "3", [](const C& c) { return c.lanes == 3; }, "65"},
      {"cpu-threads", "5", [](const C& c) { return c.cpu_threads == 5; }, "many"},
      {"lane-workspace", "1MiB", [](const C& c) { return c.lane_workspace_bytes == 1 << 20; },
       "1Q"},
      {"staging-max", "0", [](const C& c) { return c.staging_max_bytes == 0; }, "-1"},
      {"staging-min", "1MiB", [](const C& c) { return c.staging_min_bytes == 1 << 20; }, "0"},
      {"max-request-bytes", "64 KiB", [](const C& c) { return c.max_request_bytes == 65536; },
       "2GiB"},
      {"memory-budget", "1.5GiB", [](const C& c) { return c.memory_budget_bytes == 3 << 29; },
       "-1"},
      {"receive-memory", "0", [](const C& c) { return c.receive_memory_bytes == 0; }, "-1"},
      {"grpc-memory-max", "5GiB",
       [](const C& c) { return c.grpc_memory_max_bytes == int64_t{5} << 30; }, "3GiB"},
      {"max-queue", "11", [](const C& c) { return c.max_queue == 11; }, "0"},
      {"shared-memory-socket", "/tmp/m",
       [](const C& c) { return c.shared_memory_socket == "/tmp/m"; }, ""},
      {"shared-memory-max", "2GiB",
       [](const C& c) { return c.shared_memory_max_bytes == int64_t{2} << 30; }, "0"},
      {"shared-memory-client-max", "8KiB",
       [](const C& c) { return c.shared_memory_client_max_bytes == 8192; }, "4095"},
      {"shared-memory-client-regions", "9",
       [](const C& c) { return c.shared_memory_client_regions == 9; }, "0"},
      {"oip-shared-memory-regions", "7",
       [](const C& c) { return c.oip_shared_memory_regions == 7; }, "0"},
      {"oip-shared-memory-bytes", "64MiB",
       [](const C& c) { return c.oip_shared_memory_bytes == 64 << 20; }, "0"},
      {"session-memory", "8MiB", [](const C& c) { return c.session_memory_bytes == 8 << 20; },
       "8388607B"},
      {"session-lease", "2.5", [](const C& c) { return c.session_lease_seconds == 2.5; }, "0"},
      {"max-sessions", "8", [](const C& c) { return c.max_sessions == 8; }, "0"},
  };
}

std::vector<Setting> WorkSettings() {
  using C = Config;
  return {
      {"max-batch-requests", "12", [](const C& c) { return c.max_batch_requests == 12; }, "0"},
      {"split-gflop", "0.5", [](const C& c) { return c.split_gflop == 0.5; }, "-1"},
      {"max-batch-gflop", "2.5", [](const C& c) { return c.max_batch_gflop == 2.5; }, "nan"},
      {"max-batch-bytes", "1K", [](const C& c) { return c.max_batch_bytes == 1024; }, "0"},
      {"max-batch-delay-us", "13", [](const C& c) { return c.max_batch_delay_us == 13; }, "1.5"},
      {"tenant", "a=2,default=3",
       [](const C& c) {
         return c.tenants.weights() == std::vector<int32_t>{3, 2} && c.tenants.Find("a") == 1;
       },
       "a=0"},
      {"priority-aging-ms", "14", [](const C& c) { return c.priority_aging_ms == 14; }, "0"},
      {"reference-check", "sample:0.25", [](const C& c) { return c.check_sample == 0.25; },
       "sample:1.5"},
      {"check-seed", "18446744073709551615", [](const C& c) { return c.check_seed == UINT64_MAX; },
       "x"},
      {"check-threads", "2", [](const C& c) { return c.check_threads == 2; }, "0"},
      {"max-checks", "5", [](const C& c) { return c.max_checks == 5; }, "0"},
      {"max-request-gflop", "0.5", [](const C& c) { return c.max_request_gflop == 0.5; }, "-1"},
      {"check-dump-dir", "/tmp/d", [](const C& c) { return c.check_dump_dir == "/tmp/d"; }, ""},
      {"check-dump-max", "4", [](const C& c) { return c.check_dump_max == 4; }, "-4"},
      {"check-dump-interval", "2.5",
       [](const C& c) { return c.check_dump_interval_seconds == 2.5; }, "-1"},
      {"copy-threads", "6", [](const C& c) { return CopyThreads(c) == 6; }, "257"},
      {"drain-timeout", "1.5", [](const C& c) { return c.drain_timeout_seconds == 1.5; }, "-1"},
      {"log-level", "debug", [](const C& c) { return c.log_level == "debug"; }, "loud"},
      {"log-format", "json", [](const C& c) { return c.log_format == "json"; }, "xml"},
      {"log-file", "/tmp/l", [](const C& c) { return c.log_file == "/tmp/l"; }, ""},
      {"log-rate", "0.5", [](const C& c) { return c.log_rate == 0.5; }, "-1"},
  };
}

std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (const auto& each : {ConnectionSettings(), MemorySettings(), WorkSettings()}) {
    settings.insert(settings.end(), each.begin(), each.end());
  }
  return settings;
}

std::string EnvName(const std::string& flag) {
  std::string name = "ATTEND_" + flag;
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

std::string TemporaryFile(const std::string& content) {
  const std::string path = ::testing::TempDir() + "attend_config_" + std::to_string(getpid());
  std::ofstream(path) << content;
  return path;
}

TEST(ConfigTest, DefaultsHoldWhenNothingIsSet) {
  const Parsed parsed = Parse({});
  ASSERT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
  EXPECT_EQ(parsed.config.listen, std::vector<std::string>{"127.0.0.1:8001"});
  EXPECT_EQ(parsed.config.metrics_listen, "127.0.0.1:8002");
  const int64_t budget = DefaultMemoryBudget(ProcessMemoryLimit().bytes);
  EXPECT_EQ(parsed.config.memory_budget_bytes, budget);
  EXPECT_EQ(parsed.config.grpc_memory_max_bytes, std::max(budget, int64_t{4} << 30));
  EXPECT_EQ(parsed.config.check_sample, 0);
  EXPECT_TRUE(parsed.config.allocator_tuning);
}

TEST(ConfigTest, EverySettingFromFlagEnvironmentAndFile) {
  for (const Setting& setting : Settings()) {
    SCOPED_TRACE(setting.flag);
    EXPECT_FALSE(setting.holds(Config())) << "the test's value is the default";
    const Parsed flag = Parse({"--" + setting.flag, setting.text});
    EXPECT_EQ(flag.outcome, ConfigOutcome::kRun) << flag.text;
    EXPECT_TRUE(setting.holds(flag.config));
    {
      const std::string name = EnvName(setting.flag);
      const ScopedEnv env(name.c_str(), setting.text.c_str());
      const Parsed parsed = Parse({});
      EXPECT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
      EXPECT_TRUE(setting.holds(parsed.config));
    }
    const std::string value = setting.flag == "listen"   ? "[\"127.0.0.1:9\", \"unix:/tmp/s\"]"
                              : setting.flag == "tenant" ? "[\"a=2\", \"default=3\"]"
                                                         : "\"" + setting.text + "\"";
    const std::string path = TemporaryFile(setting.flag + " = " + value + "\n");
    const Parsed file = Parse({"--config", path});
    EXPECT_EQ(file.outcome, ConfigOutcome::kRun) << file.text;
    EXPECT_TRUE(setting.holds(file.config));
    std::remove(path.c_str());
  }
}

TEST(ConfigTest, BadValuesAreOneLineThatNamesTheFlag) {
  for (const Setting& setting : Settings()) {
    if (setting.bad.empty()) continue;
    SCOPED_TRACE(setting.flag);
    const Parsed parsed = Parse({"--" + setting.flag + "=" + setting.bad});
    EXPECT_EQ(parsed.outcome, ConfigOutcome::kError);
    EXPECT_NE(parsed.text.find("--" + setting.flag), std::string::npos) << parsed.text;
    EXPECT_NE(parsed.text.find(setting.bad), std::string::npos) << parsed.text;
    EXPECT_EQ(parsed.text.find('\n'), parsed.text.size() - 1) << parsed.text;
  }
}

TEST(ConfigTest, FlagsWinOverFileOverEnvironment) {
  const ScopedEnv env("ATTEND_MAX_QUEUE", "1");
  const ScopedEnv other("ATTEND_LANES", "1");
  const std::string path = TemporaryFile("max-queue = 2\nlanes = 2\nmax-streams = 2\n");
  const Parsed parsed = Parse({"--config", path, "--max-queue", "3"});
  EXPECT_EQ(parsed.config.max_queue, 3);
  EXPECT_EQ(parsed.config.lanes, 2);
  EXPECT_EQ(parsed.config.max_streams, 2);
  const ScopedEnv file("ATTEND_CONFIG", path.c_str());
  EXPECT_EQ(Parse({}).config.max_streams, 2);
  std::remove(path.c_str());
}

TEST(ConfigTest, Switches) {
  EXPECT_FALSE(Parse({}).config.shared_memory);
  EXPECT_TRUE(Parse({"--shared-memory"}).config.shared_memory);
  EXPECT_FALSE(Parse({"--shared-memory"}).config.shared_memory_any_user);
  EXPECT_TRUE(Parse({"--shared-memory-any-user"}).config.shared_memory_any_user);
  EXPECT_EQ(Parse({"--shared-memory=maybe"}).outcome, ConfigOutcome::kError);
  const ScopedEnv shared("ATTEND_SHARED_MEMORY", "true");
  EXPECT_TRUE(Parse({}).config.shared_memory);
  EXPECT_FALSE(Parse({"--no-reflection"}).config.reflection);
  EXPECT_TRUE(Parse({}).config.reflection);
  EXPECT_FALSE(Parse({"--no-allocator-tuning"}).config.allocator_tuning);
  EXPECT_TRUE(Parse({"--allocator-tuning"}).config.allocator_tuning);
  const ScopedEnv env("ATTEND_ALLOCATOR_TUNING", "false");
  EXPECT_FALSE(Parse({}).config.allocator_tuning);
}

TEST(ConfigTest, UnknownFlagsKeysAndFilesAreErrors) {
  EXPECT_EQ(Parse({"--bogus"}).outcome, ConfigOutcome::kError);
  EXPECT_EQ(Parse({"stray"}).outcome, ConfigOutcome::kError);
  EXPECT_EQ(Parse({"--config", "/nonexistent/file"}).outcome, ConfigOutcome::kError);
  const std::string path = TemporaryFile("bogus = 1\n");
  const Parsed parsed = Parse({"--config", path});
  EXPECT_EQ(parsed.outcome, ConfigOutcome::kError);
  const std::string line = "attend-server: --config " + path +
                           ": \"bogus\" is not the name of a setting (see attend-server --help)\n";
  EXPECT_EQ(parsed.text, line);
  const ScopedEnv env("ATTEND_CONFIG", path.c_str());
  EXPECT_EQ(Parse({}).text, line);
  std::ofstream(path) << "max-queue = 1\n[limits]\nmax-queue = 2\n";
  EXPECT_NE(Parse({}).text.find("settings must not be in a section, and there is [limits]"),
            std::string::npos)
      << Parse({}).text;
  std::remove(path.c_str());
}

TEST(ConfigTest, TenantsOneByOneAndNoneTwice) {
  const Parsed parsed = Parse({"--tenant", "a=2", "--tenant", "b=5"});
  ASSERT_EQ(parsed.outcome, ConfigOutcome::kRun) << parsed.text;
  EXPECT_EQ(parsed.config.tenants.weights(), (std::vector<int32_t>{1, 2, 5}));
  for (const char* bad : {"a=1,a=2", "a", "=1", "a b=1", "a=1001", ""}) {
    const Parsed refused = Parse({"--tenant=" + std::string(bad)});
    EXPECT_EQ(refused.outcome, ConfigOutcome::kError) << bad;
    EXPECT_NE(refused.text.find("--tenant"), std::string::npos) << refused.text;
    EXPECT_EQ(refused.text.find('\n'), refused.text.size() - 1) << refused.text;
  }
}

TEST(ConfigTest, GrpcMemoryHasRoomForSeveralMessages) {
  EXPECT_EQ(Parse({"--grpc-memory-max", "0"}).config.grpc_memory_max_bytes, 0);
  const Parsed few = Parse({"--max-request-bytes", "1MiB", "--grpc-memory-max", "4MiB"});
  EXPECT_EQ(few.outcome, ConfigOutcome::kRun) << few.text;
  const Parsed less = Parse({"--max-request-bytes", "1MiB", "--grpc-memory-max", "4194303B"});
  EXPECT_EQ(less.outcome, ConfigOutcome::kError);
  EXPECT_NE(less.text.find("at least four times --max-request-bytes, 1MiB"), std::string::npos)
      << less.text;
}

TEST(ConfigTest, MemoryIsWhatThereIs) {
  EXPECT_EQ(DefaultMemoryBudget(int64_t{1} << 40), int64_t{4} << 30);
  EXPECT_EQ(DefaultMemoryBudget((int64_t{2} << 30) + 5), int64_t{512} << 20);
  const Parsed small = Parse({"--memory-budget", "8MiB", "--max-request-bytes", "4MiB"});
  EXPECT_EQ(small.config.grpc_memory_max_bytes, 16 << 20);
  const Parsed much = Parse({"--memory-budget", "1000TiB"});
  EXPECT_EQ(much.outcome, ConfigOutcome::kError);
  EXPECT_NE(much.text.find("--memory-budget: 1000TiB is more than "), std::string::npos)
      << much.text;
}

TEST(HostMemoryTest, TheLowestBoundCounts) {
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

TEST(ConfigTest, DeviceLists) {
  for (const char* good : {"auto", "cpu", "cuda:all", "cuda:3", "cuda:0,cuda:2", "cpu,cuda:0"}) {
    EXPECT_EQ(Parse({"--device", good}).outcome, ConfigOutcome::kRun) << good;
  }
  for (const char* bad : {"", "cuda", "cuda:", "cuda:x", "cuda:0,0", "auto,cpu", "cpu,", "0"}) {
    EXPECT_EQ(Parse({"--device=" + std::string(bad)}).outcome, ConfigOutcome::kError) << bad;
  }
}

TEST(ConfigTest, HelpExplainsEverySetting) {
  const Parsed help = Parse({"--help"});
  EXPECT_EQ(help.outcome, ConfigOutcome::kPrinted);
  for (const Setting& setting : Settings()) {
    EXPECT_NE(help.text.find("--" + setting.flag + " "), std::string::npos) << setting.flag;
    EXPECT_NE(help.text.find("[$" + EnvName(setting.flag) + "]"), std::string::npos)
        << setting.flag;
  }
  for (const char* part : {"Network:", "Devices:", "Limits:", "[4GiB]", "[30]", "SECONDS"}) {
    EXPECT_NE(help.text.find(part), std::string::npos) << part;
  }
  EXPECT_NE(help.text.find("--allocator-tuning,--no-allocator-tuning\n"), std::string::npos);
  EXPECT_EQ(help.text.find('{'), help.text.find("{\"pid\"")) << "names CLI11's marks";
  const Parsed version = Parse({"--version"});
  EXPECT_EQ(version.outcome, ConfigOutcome::kPrinted);
  EXPECT_EQ(version.text, VersionText() + "\n");
}

TEST(ByteSizeTest, ReadsAndWrites) {
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

// Runs the binary; its exit code, and what it wrote to `stream` (1 or 2).
std::pair<int, std::string> RunBinary(const std::string& arguments, int stream) {
  const std::string redirect = stream == 1 ? " 2>/dev/null" : " 2>&1 >/dev/null";
  FILE* pipe = popen((std::string(ATTEND_SERVER_BINARY) + " " + arguments + redirect).c_str(), "r");
  std::string text;
  char buffer[1024];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, got);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

TEST(BinaryTest, ExitCodes) {
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
