// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/bench_cpu_rival.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

extern char** environ;

namespace attend::bench {
namespace {

nlohmann::json AsJson(const Problem& p) {
  return {{"batch", p.batch},
          {"heads_q", p.heads_q},
          {"heads_kv", p.heads_kv},
          {"len_q", p.len_q},
          {"len_k", p.len_k},
          {"dim", p.dim},
          {"dtype", DTypeName(p.dtype)},
          {"causal", p.mask.right == 0}};
}

}  // namespace

std::unique_ptr<CpuRival> CpuRival::Start(const std::string& python, int threads) {
  int input[2], output[2];
  if (pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0) return nullptr;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  std::vector<std::string> words = {python, ATTEND_BENCH_FOLDER "/bench_cpu_rival.py",
                                    std::to_string(threads)};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = 0;
  const int error =
      posix_spawnp(&pid, arguments.front(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(input[0]);
  close(output[1]);
  if (error != 0) {
    std::printf("without PyTorch: %s: %s\n", python.c_str(), std::strerror(error));
    close(input[1]);
    close(output[0]);
    return nullptr;
  }
  std::unique_ptr<CpuRival> rival(new CpuRival(pid, fdopen(input[1], "w"), fdopen(output[0], "r")));
  const nlohmann::json first = rival->Answer();
  if (first.is_null()) {
    std::printf("without PyTorch: %s ended\n", words[1].c_str());
    return nullptr;
  }
  rival->version_ = first["version"];
  return rival;
}

CpuRival::~CpuRival() {
  std::fclose(input_);  // ends the process
  std::fclose(output_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

std::string CpuRival::Prepare(const Problem& problem, bool backward) {
  return Ask({{"prepare", AsJson(problem)}, {"backward", backward}}).value("name", "");
}

double CpuRival::Run() { return Ask({{"run", 1}}).value("seconds", 0.0); }

nlohmann::json CpuRival::PythonCall(const Problem& problem) {
  return Ask({{"python", AsJson(problem)}});
}

nlohmann::json CpuRival::Ask(const nlohmann::json& question) {
  std::fprintf(input_, "%s\n", question.dump().c_str());
  std::fflush(input_);
  return Answer();
}

// Null if the process has ended.
nlohmann::json CpuRival::Answer() {
  std::string line;
  for (int c = std::fgetc(output_); c != EOF; c = std::fgetc(output_)) {
    if (c == '\n') return nlohmann::json::parse(line, nullptr, false);
    line += static_cast<char>(c);
  }
  return nlohmann::json();
}

}  // namespace attend::bench
