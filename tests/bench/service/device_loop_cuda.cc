// SPDX-License-Identifier: Apache-2.0
//
// device_loop.h in a build with CUDA.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <utility>

#include "kernels/contract/select.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/reference/check_rows.h"
#include "tests/bench/service/device_loop.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Launches between two readings of the clock; enough that the device does not wait for the host.
constexpr int kLaunches = 8;

class CudaLoop final : public DeviceLoop {
 public:
  CudaLoop(int device, test::OwnedAttention owned, KernelId kernel)
      : device_(device), owned_(std::move(owned)), run_(&owned_, kernel) {}

  // Runs once and checks the answer.
  Status Prepare() {
    ATTEND_RETURN_IF_ERROR(run_.Run());
    const RowsReport report = CheckRows(owned_.attention, SampleRows(owned_.attention, 1, 1e7));
    return report.ok ? Status() : Internal("the plain loop: " + report.detail);
  }

  Result<Sample> Drive(double seconds) override {
    ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaSetDevice(device_), "set device"));
    Sample sample;
    const Clock::time_point begin = Clock::now();
    do {
      for (int n = 0; n < kLaunches; ++n) ATTEND_RETURN_IF_ERROR(run_.Launch());
      ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaStreamSynchronize(nullptr), "plain loop"));
      sample.calls += kLaunches;
      sample.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (sample.seconds < seconds);
    return sample;
  }

 private:
  const int device_;
  test::OwnedAttention owned_;
  test::DeviceRun run_;
};

}  // namespace

Result<std::unique_ptr<DeviceLoop>> DeviceLoop::Make(const std::string& device,
                                                     const test::ProblemSpec& spec, uint64_t seed) {
  const int index = std::atoi(device.c_str() + device.find(':') + 1);
  const Result<DeviceInfo> info = cuda::ReadDeviceInfo(index, BackendOptions{});
  if (!info.ok()) return info.status();
  test::OwnedAttention owned = test::MakeAttention(spec, seed);
  const Result<Selection> selection = Select(spec.problem, *info);
  if (!selection.ok()) return selection.status();
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaSetDevice(index), "set device"));
  auto loop = std::make_unique<CudaLoop>(index, std::move(owned), selection->kernel);
  ATTEND_RETURN_IF_ERROR(loop->Prepare());
  return std::unique_ptr<DeviceLoop>(std::move(loop));
}

}  // namespace attend::bench
