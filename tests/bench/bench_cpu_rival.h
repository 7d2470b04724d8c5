// SPDX-License-Identifier: Apache-2.0
//
// PyTorch with the same number of threads, in a child process (bench_cpu_rival.py) that computes on
// request, so that it can take turns with attend.

#pragma once

#include <sys/types.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/contract/problem.h"

namespace attend::bench {

class CpuRival {
 public:
  // Null, with the reason printed, if that Python cannot run the script.
  static std::unique_ptr<CpuRival> Start(const std::string& python, int threads);
  ~CpuRival();
  CpuRival(const CpuRival&) = delete;
  CpuRival& operator=(const CpuRival&) = delete;

  // PyTorch's version and instruction set; empty if it is not installed.
  const std::string& version() const { return version_; }
  // Makes inputs for the problem, and returns the name of PyTorch's fastest implementation.
  std::string Prepare(const Problem& problem, bool backward);
  // Runs it once; returns the seconds.
  double Run();
  // Microseconds of attend.attention in this Python with NumPy arrays and with tensors, and of
  // PyTorch's own attention. 0 where a library is missing.
  nlohmann::json PythonCall(const Problem& problem);

 private:
  CpuRival(pid_t pid, FILE* input, FILE* output) : pid_(pid), input_(input), output_(output) {}
  nlohmann::json Ask(const nlohmann::json& question);
  nlohmann::json Answer();

  const pid_t pid_;
  FILE* const input_;   // the child's stdin
  FILE* const output_;  // the child's stdout
  std::string version_;
};

}  // namespace attend::bench
