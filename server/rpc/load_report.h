// SPDX-License-Identifier: Apache-2.0
//
// How busy the server is, for clients that choose among several by it: an ORCA load report
// (xds.data.orca.v3.OrcaLoadReport), which clients of gRPC with weighted round robin read from the
// trailing metadata of any call.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/wire/wire_call.h"

namespace attend {

struct LoadReport {
  double utilization = 0;     // busy lanes by lanes, on average
  double requests_per_s = 0;  // that were answered

  // As application_utilization and rps_fractional of an OrcaLoadReport. Zeros are left out.
  std::string Encode() const;
};

// Averages of about a second, made by whoever asks next. Thread-safe.
class LoadMeter {
 public:
  // Totals since the start.
  struct Totals {
    double answered = 0;  // requests
    Duration busy{0};     // of all lanes together
    int64_t lanes = 0;
  };
  // `totals` is called at most once a second. The arguments must outlive it.
  LoadMeter(std::function<Totals()> totals, const Clock& clock);

  // Encoded; empty in the first second.
  std::string Report() ATTEND_EXCLUDES(mutex_);
  // Gives the report to a call that has not ended.
  void Tell(const WireCall& call);

 private:
  const std::function<Totals()> totals_;
  const Clock& clock_;
  Mutex mutex_;
  TimePoint since_ ATTEND_GUARDED_BY(mutex_);
  Totals before_ ATTEND_GUARDED_BY(mutex_);
  std::string report_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend
