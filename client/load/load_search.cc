// SPDX-License-Identifier: Apache-2.0

#include "client/load/load_search.h"

#include <cmath>
#include <cstdio>

namespace attend::client {

RateSearch::RateSearch(double start, double precision, double floor)
    : precision_(precision), floor_(floor), rate_(start > 0 ? start : 100) {}

void RateSearch::Add(bool met) {
  (met ? best_ : worst_) = rate_;
  ++measured_;
  if (worst_ == 0) {
    rate_ = 2 * best_;
  } else if (best_ == 0) {
    rate_ = worst_ / 2;
  } else {
    rate_ = std::sqrt(best_ * worst_);
    done_ = worst_ / best_ <= 1 + precision_;
  }
  done_ = done_ || measured_ >= 40 || (rate_ < floor_ && best_ == 0) || rate_ > 1e7;
}

FoundRate RateSearch::Found(double p99_ms) const {
  return {p99_ms, best_, worst_, done_ && worst_ > 0};
}

std::string DescribeFound(const FoundRate& found) {
  char text[200];
  if (found.rate_per_s > 0) {
    std::snprintf(text, sizeof text,
                  "highest rate with p99 from the intended send <= %g ms: %s requests/s%s\n",
                  found.p99_ms, RateText(found.rate_per_s).c_str(),
                  found.finished ? "" : " (search not finished)");
  } else {
    std::snprintf(text, sizeof text,
                  "no rate measured has p99 <= %g ms; the lowest, %s/s, misses it too%s\n",
                  found.p99_ms, RateText(found.lowest_per_s).c_str(),
                  found.finished ? "" : " (search not finished)");
  }
  return text;
}

bool MeetsP99(const LoadResult& result, double p99_ms) {
  const double offered = result.step.rate_per_s * result.elapsed_s;
  const int64_t answered = result.stats.from_intended.count();
  return answered > 0 && result.stats.unexpected == 0 && result.unanswered == 0 &&
         result.due_unsent == 0 &&
         static_cast<double>(result.stats.window_ok) >= 0.9 * offered - 2 * std::sqrt(offered) &&
         static_cast<double>(result.stats.from_intended.ValueAt(0.99)) <= p99_ms * 1e6;
}

}  // namespace attend::client
