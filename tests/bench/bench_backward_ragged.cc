// SPDX-License-Identifier: Apache-2.0
//
// The gain of sharing launches for backward passes of small, different shapes: the time of a batch
// in one call compared with one call per item. Each item is checked against the reference first; a
// wrong result prints no time.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cuda_run.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::bench {
namespace {

constexpr int kRounds = 25;
constexpr int kCalls = 20;  // per round

void Require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}
void Require(cudaError_t error, const char* what) { Require(cuda::ToStatus(error, what)); }

// A backward pass on the device, whose gradients are checked.
struct Item {
  Item(const test::ProblemSpec& spec, uint64_t seed, const test::Way& way)
      : owned(test::MakeAttention(spec, seed)) {
    CpuReference(owned.attention);
    gradients = std::make_unique<test::OwnedGradients>(owned.attention, seed + 1);
    if (!test::Takes(way, owned.attention, gradients->get())) {
      throw std::runtime_error(test::NameOf(way) + " does not support the shape");
    }
    run = std::make_unique<test::BackwardRun>(&owned, gradients.get(), way);
    Require(run->Prepare());
    Require(run->Launch(nullptr));
    Require(cudaDeviceSynchronize(), "the backward pass");
    Require(run->Fetch());
    const test::GradientsJudge judge(owned.attention, gradients->get(),
                                     test::FactorsOf(way, owned.attention.problem));
    const std::string fault = judge.Fault(gradients->get());
    if (!fault.empty()) throw std::runtime_error("wrong: " + fault);
  }

  test::OwnedAttention owned;
  std::unique_ptr<test::OwnedGradients> gradients;
  std::unique_ptr<test::BackwardRun> run;
};

double MedianUs(const std::function<void()>& enqueue) {
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "an event");
  Require(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int n = 0; n < kRounds + 2; ++n) {
    Require(cudaEventRecord(begin), "the begin");
    for (int call = 0; call < kCalls; ++call) enqueue();
    Require(cudaEventRecord(end), "the end");
    Require(cudaEventSynchronize(end), "a round");
    float ms = 0;
    Require(cudaEventElapsedTime(&ms, begin, end), "its time");
    if (n >= 2) times.push_back(1000 * ms / kCalls);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

void Race(const test::Way& way, int64_t dim, int count, int64_t longest) {
  std::vector<std::unique_ptr<Item>> items;
  std::vector<cuda::BackwardItem> list;
  const uint64_t seed = test::FreshSeed();
  for (int n = 0; n < count; ++n) {
    // Lengths from an eighth of the longest up to it.
    const int64_t len = std::max<int64_t>(longest * (n % 8 + 1) / 8 - n, 1);
    test::ProblemSpec spec = test::MakeSpec(1, 4, 4, len, len, dim, dim, DType::kFloat16);
    if (n % 2 == 1) spec.problem.mask.right = 0;
    spec.problem.return_lse = true;
    items.push_back(std::make_unique<Item>(spec, seed + static_cast<uint64_t>(n), way));
    list.push_back(items.back()->run->item());
  }
  const Result<int64_t> bytes = cuda::BackwardWorkspaceBytes(list);
  Require(bytes.status());
  const test::DeviceMemory workspace(*bytes);
  const double together =
      MedianUs([&] { Require(cuda::LaunchBackward(list, workspace.get(), *bytes, nullptr)); });
  const double alone = MedianUs([&] {
    for (const cuda::BackwardItem& item : list) {
      Require(cuda::LaunchBackward({&item, 1}, workspace.get(), *bytes, nullptr));
    }
  });
  std::printf("| %s | %lld | %d, up to %lld | %.0f | %.0f | %.2f |\n", test::NameOf(way).c_str(),
              static_cast<long long>(dim), count, static_cast<long long>(longest), alone, together,
              alone / together);
  std::fflush(stdout);
}

int Main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: there is no GPU\n");
    return 77;
  }
  std::printf("| Kernel | D | Items, tokens | one call each, us | one call, us | ratio |\n");
  std::printf("|---|---:|---|---:|---:|---:|\n");
  for (const test::Way& way : test::kWays) {
    for (const int64_t dim : {int64_t{64}, int64_t{128}}) {
      if (way.kernel == KernelId::kCudaFlashFp32 && dim > 64) continue;
      Race(way, dim, 4, 512);
      Race(way, dim, 16, 512);
    }
  }
  return 0;
}

}  // namespace
}  // namespace attend::bench

int main() {
  try {
    return attend::bench::Main();
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "bench_backward_ragged: %s\n", failure.what());
    return 1;
  }
}
