// SPDX-License-Identifier: Apache-2.0
//
// A family of counters by gRPC status code.

#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "kernels/util/status.h"
#include "server/metrics/make_family.h"

namespace attend {

class CodeCounters {
 public:
  CodeCounters(prometheus::Registry& registry, const char* name, const char* help,
               prometheus::Labels labels = {}) {
    // Codes without a name count as UNKNOWN.
    for (size_t code = 0; code < counters_.size(); ++code) {
      labels["code"] = std::string(CodeName(static_cast<Code>(code)));
      counters_[code] = &MakeCounter(registry, name, help, labels);
    }
  }

  void Count(Code code) const {
    const auto index = static_cast<size_t>(code);
    const auto unknown = static_cast<size_t>(Code::kUnknown);
    counters_[index < counters_.size() ? index : unknown]->Increment();
  }
  double value(Code code) const { return counters_[static_cast<size_t>(code)]->Value(); }

 private:
  std::array<prometheus::Counter*, 15> counters_{};  // gRPC's codes up to UNAVAILABLE, with gaps
};

}  // namespace attend
