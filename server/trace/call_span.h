// SPDX-License-Identifier: Apache-2.0
//
// The data of one call's span and of its phases, which are child spans.

#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/util/status.h"
#include "server/trace/trace_parent.h"

namespace attend {

using SpanTime = std::chrono::system_clock::time_point;

struct CallSpan {
  struct Phase {
    std::string_view name;  // a literal
    uint64_t span = 0;
    SpanTime begin, end;
  };
  static constexpr size_t kPhasesMax = 8;

  TraceParent own;
  uint64_t parent = 0;  // 0: it is the root of its trace
  std::string method;   // "/attend.v1.AttentionService/Attend"
  SpanTime begin, end;
  Code code = Code::kOk;
  std::string error;
  // Empty or zero: the call did not get that far.
  std::string request_id;
  std::string tenant;
  std::string device;
  std::string_view kernel;  // literals, also the next two
  std::string_view dtype;
  std::string_view transport;
  int64_t batch_requests = 0;
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
  std::array<Phase, kPhasesMax> phases;
  size_t phase_count = 0;

  void AddPhase(std::string_view name, uint64_t id, SpanTime from, SpanTime to) {
    if (phase_count < phases.size()) phases[phase_count++] = {name, id, from, to};
  }
};

}  // namespace attend
