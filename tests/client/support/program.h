// SPDX-License-Identifier: Apache-2.0
//
// attend-client as a child process of a test, and tensors for its files.

#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "client/call/random.h"
#include "client/call/tensor.h"
#include "client/tool/file_io.h"
#include "tests/client/support/test_seed.h"

extern char** environ;

#ifdef ATTEND_THREAD_SANITIZER
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_suppressions();
#endif

namespace attend::client {

inline std::string Path(const std::string& name) { return ScratchPath(name); }

struct Ended {
  int exit_code = -1;
  std::string out;
  std::string err;
};

// The program has no defaults for ThreadSanitizer of its own; it gets this test's.
inline void PassSanitizerOptions() {
#ifdef ATTEND_THREAD_SANITIZER
  const std::string text = __tsan_default_suppressions();
  const std::string path = Path("tsan.supp");
  EXPECT_TRUE(WriteFile(path, {{text.data(), static_cast<int64_t>(text.size())}}).ok());
  const std::string options = __tsan_default_options() + (" suppressions=" + path);
  setenv("TSAN_OPTIONS", options.c_str(), 1);
#endif
}

// The program in the background, its output in files.
class Program {
 public:
  explicit Program(std::vector<std::string> args) {
    PassSanitizerOptions();
    args.insert(args.begin(), ATTEND_CLIENT_BINARY);
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_addopen(&actions, 1, Path("out").c_str(), flags, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, Path("err").c_str(), flags, 0600);
    EXPECT_EQ(posix_spawn(&pid_, ATTEND_CLIENT_BINARY, &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  void Interrupt() { kill(pid_, SIGINT); }
  Ended Wait() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    Ended ended;
    ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    ended.out = *ReadWholeFile(Path("out"));
    ended.err = *ReadWholeFile(Path("err"));
    return ended;
  }

 private:
  pid_t pid_ = -1;
};

inline Ended RunProgram(std::vector<std::string> args) { return Program(std::move(args)).Wait(); }

inline HostTensor Random4(DType dtype, std::vector<int64_t> shape, uint64_t seed) {
  HostTensor tensor = *HostTensor::Make("t", dtype, std::move(shape));
  Random random(seed);
  for (int64_t i = 0; i < tensor.bytes / DTypeBytes(dtype); ++i) {
    StoreElement(tensor.data.get(), dtype, i, random.AboutNormal());
  }
  return tensor;
}

}  // namespace attend::client
