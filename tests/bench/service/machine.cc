// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/machine.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <thread>

#include "kernels/contract/backend.h"
#include "server/app/config.h"

namespace attend::bench {
namespace {

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line.empty() ? "unknown" : line;
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

nlohmann::ordered_json Machine(const std::string& device) {
  const Result<std::unique_ptr<Backend>> backend = MakeBackend(device, BackendOptions());
  return {{"device", device},
          {"device_description", backend.ok() ? (*backend)->info().description : "unknown"},
          {"cpu", CpuName()},
          {"cores", std::thread::hardware_concurrency()},
          {"cores_online", sysconf(_SC_NPROCESSORS_ONLN)},
          {"congestion_control", FirstLine("/proc/sys/net/ipv4/tcp_congestion_control")},
          {"kernel", FirstLine("/proc/sys/kernel/osrelease")},
          {"grpc", grpc::Version()},
          {"build", BuildText()}};
}

std::string MachineText(const nlohmann::ordered_json& machine) {
  std::string text;
  for (const auto& [name, value] : machine.items()) {
    text += (text.empty() ? "" : "; ") + name + " " +
            (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

Status WriteJson(const std::string& path, const nlohmann::ordered_json& json) {
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  return file.flush() ? Status() : Status(Code::kUnavailable, "cannot write " + path);
}

}  // namespace attend::bench
