// SPDX-License-Identifier: Apache-2.0
//
// The server's load, for clients that balance over several servers: an ORCA load report
// (xds.data.orca.v3.OrcaLoadReport). gRPC clients with weighted round robin read it from the
// trailing metadata of any call.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "server/rpc/wire_call.h"

namespace attend {

struct LoadReport {
  double utilization = 0;     // average share of lanes that are busy
  double requests_per_s = 0;  // answered requests

  // Encodes application_utilization and rps_fractional. Zeros are omitted.
  std::string Encode() const;
};

// Averages over about a second, updated by the next caller that asks. Thread-safe.
class LoadMeter {
 public:
  // Totals since the start.
  struct Totals {
    double answered = 0;  // number of requests
    Duration busy{0};     // summed over lanes
    int64_t lanes = 0;
  };
  // `totals` is called at most once a second. The arguments must outlive it.
  LoadMeter(std::function<Totals()> totals, const Clock& clock);

  // The encoded report; empty during the first second.
  std::string Report() ATTEND_EXCLUDES(mutex_);
  // Adds the report to the trailers of a call that has not ended.
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
