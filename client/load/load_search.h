// SPDX-License-Identifier: Apache-2.0
//
// Search for the highest rate that meets a latency bound: doubling until a rate fails (or halving
// until one passes), then bisection. Pure.

#pragma once

#include <string>

#include "client/load/load_stats.h"

namespace attend::client {

class RateSearch {
 public:
  // Rates in requests per second; `start` 0: 100. Ends when the result is known to a relative
  // `precision`, after 40 measurements, or when the next rate would be below `floor`, where there
  // are too few requests for a p99.
  RateSearch(double start, double precision, double floor);

  bool done() const { return done_; }
  double rate() const { return rate_; }  // to measure next
  void Add(bool met);                    // its result
  double best() const { return best_; }  // highest rate that met the bound; 0: none
  FoundRate Found(double p99_ms) const;

 private:
  double precision_;
  double floor_;
  double rate_;
  double best_ = 0;
  double worst_ = 0;  // lowest rate that failed; 0: none
  int measured_ = 0;
  bool done_ = false;
};

std::string DescribeFound(const FoundRate& found);

// Everything was sent and answered OK (or as the options allow), nearly the whole rate was answered
// in time, and p99 from the intended send is within the bound.
bool MeetsP99(const LoadResult& result, double p99_ms);

}  // namespace attend::client
