// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_options.h"

#include <cstdio>

namespace attend::client {

const char* ArrivalsName(const LoadOptions& options) {
  return options.arrivals == Arrivals::kPoisson ? "poisson" : "constant";
}

const char* MethodName(const LoadOptions& options) {
  return options.stream ? "AttendStream" : "Attend";
}

const char* TransportName(const LoadOptions& options) {
  if (!options.shared_memory_socket.path.empty()) return options.device_memory ? "cuda-ipc" : "shm";
  if (options.stream || options.transport == CallTransport::kInline) return "inline";
  return options.transport == CallTransport::kChunked ? "chunked" : "auto";
}

std::string StepName(const LoadStep& step) {
  return step.open() ? "open " + RateText(step.rate_per_s) + "/s"
                     : "closed x" + std::to_string(step.concurrency);
}

std::string RateText(double per_s) {
  char text[64];
  std::snprintf(text, sizeof text, per_s >= 1000 ? "%.0f" : "%.4g", per_s);
  return text;
}

}  // namespace attend::client
