// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/server_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <sstream>

extern char** environ;

namespace attend::bench {
namespace {

struct Pipe {
  int read_end = -1;
  int write_end = -1;
  bool Open() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    read_end = ends[0];
    write_end = ends[1];
    return true;
  }
};

}  // namespace

Result<std::unique_ptr<ServerProcess>> ServerProcess::Start(const std::vector<std::string>& command,
                                                            double timeout_seconds) {
  Pipe input, output;
  if (!input.Open() || !output.Open()) return Unavailable("no pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input.read_end, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output.write_end, STDOUT_FILENO);
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t pid = 0;
  // Not fork(), as this process may be running gRPC.
  const int error =
      posix_spawnp(&pid, arguments.front(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(input.read_end);
  close(output.write_end);
  if (error != 0) {
    close(input.write_end);
    close(output.read_end);
    return Unavailable(command.front() + ": " + std::strerror(error));
  }
  std::unique_ptr<ServerProcess> process(new ServerProcess(pid, input.write_end, output.read_end));
  ATTEND_RETURN_IF_ERROR(process->ReadFirstLine(timeout_seconds));
  return process;
}

ServerProcess::~ServerProcess() {
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  close(input_);
  close(output_);
}

double ServerProcess::ProcessorSeconds() const {
  clockid_t clock{};
  timespec used{};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

Status ServerProcess::ReadFirstLine(double timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end =
      Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1000));
  std::string line;
  while (!line.ends_with('\n')) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return Unavailable("a server process did not start in time");
    pollfd waited{output_, POLLIN, 0};
    if (poll(&waited, 1, static_cast<int>(left.count())) <= 0) continue;
    char c = 0;
    if (read(output_, &c, 1) != 1) return Unavailable("a server process exited as it started");
    line += c;
  }
  line.pop_back();
  constexpr std::string_view kCannot = "cannot ";
  if (line.starts_with(kCannot)) return Unimplemented(line.substr(kCannot.size()));
  std::istringstream words(line);
  std::string ready;
  words >> ready >> address_ >> metrics_address_;
  if (ready != "ready" || address_.empty()) {
    return Unavailable("a server process said \"" + line + "\"");
  }
  return Status();
}

std::vector<std::string> ServeCommand(const std::string& kind,
                                      const std::vector<std::string>& arguments) {
  std::error_code error;
  std::vector<std::string> command = {
      std::filesystem::read_symlink("/proc/self/exe", error).string(), "--serve", kind};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

}  // namespace attend::bench
