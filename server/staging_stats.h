// SPDX-License-Identifier: Apache-2.0
//
// attend_staged_uploads_total{end}, attend_staged_bytes_total, attend_staged_parts_total,
// attend_staging_memory_bytes{device} and attend_staging_memory_limit_bytes{device}, read at each
// scrape. Thread-safe.

#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <vector>

#include "server/staging.h"

namespace attend {

class StagingStats final : public prometheus::Collectable {
 public:
  // `budget` must outlive this object.
  explicit StagingStats(const StagingBudget& budget) : budget_(budget) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const StagingBudget& budget_;
};

}  // namespace attend
