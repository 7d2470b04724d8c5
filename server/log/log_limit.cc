// SPDX-License-Identifier: Apache-2.0
//
// One token bucket per (event, kind), filled when it is looked at, so idle kinds cost nothing. The
// table is bounded: kinds beyond kKindsMax share one bucket, since a kind may contain a client's
// text.

#include "server/log/log_limit.h"

#include <algorithm>

namespace attend {
namespace {

constexpr std::string_view kManyKinds = "lines of many kinds";

}  // namespace

void LogLimit::Fill(Bucket& bucket, TimePoint now) const {
  const double seconds = std::chrono::duration<double>(now - bucket.filled).count();
  const double most = std::max(1.0, rate_ * kBurstSeconds);
  bucket.lines = std::min(most, bucket.lines + std::max(0.0, seconds) * rate_);
  bucket.filled = std::max(bucket.filled, now);
}

LogLimit::Buckets::iterator LogLimit::Find(std::string_view event, std::string_view kind,
                                           TimePoint now) {
  const auto found = buckets_.find(std::pair(event, kind));
  if (found != buckets_.end()) return found;
  if (buckets_.size() >= kKindsMax && event != kManyKinds) return Find(kManyKinds, "", now);
  Bucket full;
  full.lines = std::max(1.0, rate_ * kBurstSeconds);
  full.filled = now;
  return buckets_.emplace(Name(event, kind), full).first;
}

LogLimit::LeftOut LogLimit::Forget(Buckets::value_type& entry, TimePoint now) {
  auto& [name, bucket] = entry;
  LeftOut left_out{name.first, name.second, bucket.left_out, now - bucket.first_left_out};
  bucket.left_out = 0;
  return left_out;
}

LogLimit::Verdict LogLimit::Take(std::string_view event, std::string_view kind, TimePoint now) {
  Verdict verdict;
  if (rate_ <= 0) return verdict;
  const auto found = Find(event, kind, now);
  Bucket& bucket = found->second;
  Fill(bucket, now);
  if (bucket.lines < 1) {
    if (bucket.left_out++ == 0) bucket.first_left_out = now;
    verdict.write = false;
    return verdict;
  }
  bucket.lines -= 1;
  if (bucket.left_out > 0) verdict.before = Forget(*found, now);
  return verdict;
}

std::vector<LogLimit::LeftOut> LogLimit::TakeLeftOut(TimePoint now, bool all) {
  std::vector<LeftOut> said;
  for (auto& entry : buckets_) {
    Bucket& bucket = entry.second;
    if (bucket.left_out == 0) continue;
    Fill(bucket, now);
    if (!all && bucket.lines < 1) continue;
    bucket.lines = std::max(0.0, bucket.lines - 1);
    said.push_back(Forget(entry, now));
  }
  return said;
}

}  // namespace attend
