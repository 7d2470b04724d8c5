// SPDX-License-Identifier: Apache-2.0
//
// The facts about a run that its result file records, so that it can be interpreted, repeated and
// compared later.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace attend::client {

struct HostFacts {
  std::string name;
  std::string cpu;  // model; empty if unknown
  int cores = 0;    // available to this process
  std::string os;   // "Linux 6.1.0 x86_64"
};
HostFacts ThisHost();

struct DeviceFacts {
  std::string name;  // "cuda:0"
  std::string description;
  int64_t memory_bytes = 0;
  int64_t units = 0;
};

// The server's own report.
struct ServerFacts {
  std::string version;
  std::string build;
  std::vector<DeviceFacts> devices;
  std::vector<std::string> kernels;  // available ones
};

struct RunFacts {
  std::string tool_version;
  std::string command;  // line, quoted for a shell
  std::string started;  // UtcText
  HostFacts host;
  ServerFacts server;
};

// "2026-01-31T23:59:59Z".
std::string UtcText(int64_t seconds_since_1970);

// The words, quoted for a shell.
std::string ShellText(const std::vector<std::string>& words);

}  // namespace attend::client
