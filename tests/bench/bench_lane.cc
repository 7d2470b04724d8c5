// SPDX-License-Identifier: Apache-2.0
//
// The cost of a GPU lane compared with the bus and the kernels: copies of small batches, the
// overlap of large ones, and the time that small ones wait beside them. Every case is checked
// before it is timed. Prints Markdown.
//
//   bench_lane [--section growth|copies|strides|small|large|beside|timeline]...

#include "tests/bench/bench_lane.h"

#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <future>
#include <random>
#include <stdexcept>
#include <utility>

namespace attend::bench {

void Require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

void RequireCuda(int error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(cudaGetErrorString(static_cast<cudaError_t>(error)));
}

double MicrosecondsNow() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  const auto at = static_cast<size_t>(q * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

Problem HalfProblem(int64_t batch, int64_t heads, int64_t length, int64_t dim) {
  Problem p =
      test::MakeSpec(batch, heads, heads, length, length, dim, dim, DType::kFloat16).problem;
  p.return_lse = false;
  return p;
}

LaneItem::LaneItem(test::LaneHarness* harness, const Problem& problem, bool rows_before_heads) {
  const int64_t elements = ElementsQ(problem), bytes = elements * DTypeBytes(problem.dtype);
  input_ = std::make_unique<test::PinnedBlock>(3 * bytes, &harness->pinned());
  output_ = std::make_unique<test::PinnedBlock>(bytes, &harness->pinned());
  if (input_->get() == nullptr || output_->get() == nullptr) {
    throw std::runtime_error("no page-locked memory");
  }
  // Few distinct values, so that filling is faster than measuring.
  uint16_t values[256];
  for (int n = 0; n < 256; ++n) {
    StoreElement(values, DType::kFloat16, n, static_cast<float>(n - 128) / 64.0f);
  }
  std::mt19937_64 random(test::FreshSeed());
  auto* const out = reinterpret_cast<uint16_t*>(input_->get());
  for (int64_t n = 0; n < 3 * elements;) {
    uint64_t bits = random();
    for (int k = 0; k < 8 && n < 3 * elements; ++k, bits >>= 8) out[n++] = values[bits & 255];
  }
  Attention& a = item_.attention;
  a.problem = problem;
  const int64_t row = rows_before_heads ? problem.heads_q * problem.dim : problem.dim;
  const int64_t head = rows_before_heads ? problem.dim : problem.len_q * problem.dim;
  const int64_t sequence = problem.heads_q * problem.len_q * problem.dim;
  a.q = {input_->get(), sequence, head, row};
  a.k = {input_->get() + bytes, sequence, head, row};
  a.v = {input_->get() + 2 * bytes, sequence, head, row};
  a.o = {output_->get(), sequence, head, row};
  item_.inputs = {{input_->get(), 3 * bytes}};
  item_.outputs = {{output_->get(), bytes}};
  item_.selection = Require(harness->Choose(a));
}

void LaneItem::Check() const {
  const RowsReport report =
      CheckRows(item_.attention, SampleRows(item_.attention, test::FreshSeed(), 2e7));
  if (!report.ok) throw std::runtime_error("wrong: " + report.detail);
}

std::unique_ptr<Lane> MakeBenchLane(test::LaneHarness* harness, const cuda::LaneTuning& tuning,
                                    int64_t workspace_bytes, cuda::PhaseSink timeline) {
  return Require(harness->MakeLane(tuning, workspace_bytes, std::move(timeline)));
}

BatchTime TimeBatch(Lane* lane, std::span<const WorkItem> items) {
  std::promise<std::pair<double, BatchOutcome>> ended;
  BatchTime time;
  const double begin = MicrosecondsNow();
  Require(lane->Submit(items, [&ended](BatchOutcome outcome) {
    ended.set_value({MicrosecondsNow(), std::move(outcome)});
  }));
  time.submit_us = MicrosecondsNow() - begin;
  auto [end, outcome] = ended.get_future().get();
  time.total_us = end - begin;
  time.outcome = std::move(outcome);
  for (const Status& status : time.outcome.statuses) Require(status);
  return time;
}

namespace {

int Run(const std::vector<std::string>& sections) {
  const std::unique_ptr<test::LaneHarness> harness = Require(test::LaneHarness::Make());
  const std::vector<std::pair<std::string, void (*)(test::LaneHarness*)>> all = {
      {"growth", BenchGrowth},  // first, while the pool is empty
      {"copies", BenchCopies},      {"strides", [](test::LaneHarness*) { BenchStrides(); }},
      {"small", BenchSmallBatches}, {"large", BenchLarge},
      {"beside", BenchBeside},      {"timeline", PrintTimeline}};
  std::printf("%s\n", harness->info().description.c_str());
  for (const auto& [name, run] : all) {
    if (!sections.empty() && std::find(sections.begin(), sections.end(), name) == sections.end()) {
      continue;
    }
    run(harness.get());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace attend::bench

int main(int argc, char** argv) {
  CLI::App app("Times GPU lanes.");
  std::vector<std::string> sections;
  app.add_option("--section", sections, "Run only these sections")
      ->check(
          CLI::IsMember({"copies", "strides", "small", "growth", "large", "beside", "timeline"}));
  CLI11_PARSE(app, argc, argv);
  std::string why;
  if (attend::CudaDeviceCount(&why) == 0) {
    std::printf("skipped: %s\n", why.c_str());
    return 77;
  }
  try {
    return attend::bench::Run(sections);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_lane: %s\n", error.what());
    return 1;
  }
}
