// SPDX-License-Identifier: Apache-2.0
//
// PyTorch on the same threads, in a process of its own (bench_cpu_rival.py), which computes when it
// is told to: so it takes turns with what it is compared with.

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

  // PyTorch's, and what it computes with; empty if it is not installed.
  const std::string& version() const { return version_; }
  // Makes inputs for the problem, and finds which of PyTorch's ways is the fastest: its name.
  std::string Prepare(const Problem& problem, bool backward);
  // Seconds of one run of that.
  double Run();
  // attend.attention in this Python: microseconds with arrays of NumPy's, with tensors, and
  // PyTorch's own. 0: there is no such library.
  nlohmann::json PythonCall(const Problem& problem);

 private:
  CpuRival(pid_t pid, FILE* input, FILE* output) : pid_(pid), input_(input), output_(output) {}
  nlohmann::json Ask(const nlohmann::json& question);
  nlohmann::json Answer();

  const pid_t pid_;
  FILE* const input_;   // of the child
  FILE* const output_;  // of the child
  std::string version_;
};

}  // namespace attend::bench
