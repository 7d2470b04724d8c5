// SPDX-License-Identifier: Apache-2.0

#include "client/load/run_facts.h"

#include <sched.h>
#include <sys/utsname.h>

#include <ctime>
#include <fstream>

namespace attend::client {

HostFacts ThisHost() {
  HostFacts host;
  utsname system = {};
  if (uname(&system) == 0) {
    host.name = system.nodename;
    host.os = std::string(system.sysname) + " " + system.release + " " + system.machine;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) host.cores = CPU_COUNT(&cores);
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (!line.starts_with("model name") || colon == std::string::npos) continue;
    host.cpu = line.substr(colon + 2);
    break;
  }
  return host;
}

std::string UtcText(int64_t seconds_since_1970) {
  const auto seconds = static_cast<time_t>(seconds_since_1970);
  tm parts = {};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string ShellText(const std::vector<std::string>& words) {
  constexpr char kPlain[] =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += " ";
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      text += word;
      continue;
    }
    text += "'";
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    text += "'";
  }
  return text;
}

}  // namespace attend::client
