// SPDX-License-Identifier: Apache-2.0
//
// The search for the highest rate that meets a latency bound: doubling until one fails (or halving
// until one passes), then bisection. Pure.

#pragma once

#include <string>

#include "client/load/load_stats.h"

namespace attend::client {

class RateSearch {
 public:
  // Rates in requests per second; `start` 0: 100. Stops when the answer is known to `precision`,
  // relatively, after 40 measurements, or where the next rate would be below `floor`: so few
  // requests have no p99 to speak of.
  RateSearch(double start, double precision, double floor);

  bool done() const { return done_; }
  double rate() const { return rate_; }  // to measure next
  void Add(bool met);                    // how that went
  double best() const { return best_; }  // highest rate that met the bound; 0 = none
  FoundRate Found(double p99_ms) const;

 private:
  double precision_;
  double floor_;
  double rate_;
  double best_ = 0;
  double worst_ = 0;  // lowest rate that did not meet it; 0 = none
  int measured_ = 0;
  bool done_ = false;
};

std::string DescribeFound(const FoundRate& found);

// Everything sent and answered OK (or as the options asked), nearly all of the rate really sent,
// and p99 from the intended send within the bound.
bool MeetsP99(const LoadResult& result, double p99_ms);

}  // namespace attend::client
