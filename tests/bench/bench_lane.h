// SPDX-License-Identifier: Apache-2.0
//
// Shared by the parts of bench_lane: attentions in page-locked memory, medians, tables.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/lane/cuda_lane.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/lane_harness.h"

namespace attend::bench {

// Throws the status if it is an error.
void Require(const Status& status);
template <class T>
T Require(Result<T> result) {
  Require(result.status());
  return *std::move(result);
}
void RequireCuda(int error);

double MicrosecondsNow();
double Quantile(std::vector<double> values, double q);  // 0.5: the median
inline double Median(const std::vector<double>& values) { return Quantile(values, 0.5); }

// A contiguous attention with random inputs in page-locked memory, whose output has no padding.
class LaneItem {
 public:
  LaneItem(test::LaneHarness* harness, const Problem& problem, bool rows_before_heads = false);

  const WorkItem& item() const { return item_; }
  double in_bytes() const { return static_cast<double>(item_.inputs.bytes()); }
  double bytes() const { return in_bytes() + static_cast<double>(item_.outputs.bytes()); }
  void Poison() const { PoisonOutput(item_.attention); }
  void Check() const;  // sampled rows, against the reference

 private:
  std::unique_ptr<test::PinnedBlock> input_;
  std::unique_ptr<test::PinnedBlock> output_;
  WorkItem item_;
};

// float16, full mask, scale 1/sqrt(D), no LSE.
Problem HalfProblem(int64_t batch, int64_t heads, int64_t length, int64_t dim);

std::unique_ptr<Lane> MakeBenchLane(test::LaneHarness* harness, const cuda::LaneTuning& tuning,
                                    int64_t workspace_bytes, cuda::PhaseSink timeline = {});

// Microseconds from Submit to Done, and in Submit. Running a batch fails if an item failed.
struct BatchTime {
  double total_us = 0;
  double submit_us = 0;
  BatchOutcome outcome;
};
BatchTime TimeBatch(Lane* lane, std::span<const WorkItem> items);

// bench_lane_copies.cc
void BenchCopies(test::LaneHarness* harness);
void BenchStrides();
void BenchSmallBatches(test::LaneHarness* harness);
void BenchGrowth(test::LaneHarness* harness);
// bench_lane_large.cc
void BenchLarge(test::LaneHarness* harness);
void BenchBeside(test::LaneHarness* harness);
void PrintTimeline(test::LaneHarness* harness);

}  // namespace attend::bench
