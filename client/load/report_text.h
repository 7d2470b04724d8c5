// SPDX-License-Identifier: Apache-2.0
//
// Helpers common to all reports.

#pragma once

#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "client/load/histogram.h"
#include "client/tool/verify.h"
#include "kernels/util/printable.h"

namespace attend::client {

inline constexpr std::array<double, 4> kQuantiles = {0.5, 0.9, 0.99, 0.999};
inline constexpr std::array<const char*, 4> kQuantileNames = {"p50", "p90", "p99", "p99.9"};

__attribute__((format(printf, 2, 3))) inline void Append(std::string* out, const char* format,
                                                         ...) {
  char buffer[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  *out += buffer;
}

inline double Ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

inline nlohmann::ordered_json LatencyJson(const Histogram& h) {
  if (h.count() == 0) return {{"count", 0}};
  nlohmann::ordered_json json = {
      {"count", h.count()}, {"mean", h.mean() * 1e-6}, {"min", Ms(h.min())}};
  for (size_t i = 0; i < kQuantiles.size(); ++i) {
    json[kQuantileNames[i]] = Ms(h.ValueAt(kQuantiles[i]));
  }
  json["max"] = Ms(h.max());
  return json;
}

inline void AppendVerified(std::string* out, const VerifyQueue::Counts& v) {
  Append(out, "  verified by the client: passed %lld, FAILED %lld, skipped %lld",
         static_cast<long long>(v.passed), static_cast<long long>(v.failed),
         static_cast<long long>(v.skipped));
  Append(out, ", worst error / bound %.3f\n", v.worst_ratio);
  if (v.failed > 0) *out += "    first failure: " + Printable(v.first_failure) + "\n";
}

inline nlohmann::ordered_json VerifiedJson(const VerifyQueue::Counts& v) {
  return {{"passed", v.passed},
          {"failed", v.failed},
          {"skipped", v.skipped},
          {"worst_error_to_bound", v.worst_ratio},
          {"first_failure", v.first_failure}};
}

}  // namespace attend::client
