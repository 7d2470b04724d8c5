// SPDX-License-Identifier: Apache-2.0
//
// Runs a CUDA kernel on an attention of the host, without a backend in between: mirrors its memory
// on device 0, guards included, so that every byte that a kernel writes is seen. Test code, one
// thread.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/launch/launch.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

// Device memory, freed by the destructor; null if there was none.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* get() const { return data_; }

 private:
  char* data_ = nullptr;
};

// The memory of one attention on the device, kept over several runs. `owned` must outlive it.
class DeviceRun {
 public:
  // Copies the inputs. `kernel` decides how much workspace there is.
  DeviceRun(OwnedAttention* owned, KernelId kernel);

  // Fills the output with owned.output's contents and the workspace with NaN, runs, and copies the
  // output back. An error has CUDA's text.
  Status Run(int config = cuda::kDefaultConfig);

  // The steps of Run: copies inputs and owned.output's contents to the device; enqueues a run on
  // the memory as it is (after Run, which makes the workspace); copies the output back.
  Status Prepare();
  Status Launch(int config = cuda::kDefaultConfig);
  Status Fetch();

  const Attention& attention() const { return attention_; }  // on the device
  char* output() const;                                      // where owned.output is on the device

 private:
  OwnedAttention* owned_;
  KernelId kernel_;
  int64_t workspace_bytes_;
  DeviceMemory input_;
  DeviceMemory output_;
  DeviceMemory workspace_;
  Attention attention_;
};

// Resets the output, runs once.
Status RunOnDevice(OwnedAttention* owned, KernelId kernel, int config = cuda::kDefaultConfig);

inline constexpr KernelId kCudaKernels[] = {KernelId::kCudaNaive,      KernelId::kCudaFlashFp32,
                                            KernelId::kCudaFlashSm80,  KernelId::kCudaFlashSm90,
                                            KernelId::kCudaDecodeSm80, KernelId::kCudaDecodeSm90};

// Whether device 0 can compute this with `kernel`. The attention may lie on the host: a DeviceRun
// keeps its alignment.
bool CanRun(const Attention& attention, KernelId kernel);

// Compiled variants of `kernel` that device 0 can run for this problem.
std::vector<int> Configs(const Problem& problem, KernelId kernel);

// Text for a failure.
std::string Label(const ProblemSpec& spec, KernelId kernel, int config, uint64_t seed);

// Runs and checks the rows (a sample where all would cost more than `work`) and every guard. OK
// also if the kernel cannot run this; otherwise what was wrong, with Label.
Status RunAndCheck(const ProblemSpec& spec, KernelId kernel, int config, uint64_t seed,
                   double work);

// A small problem that cuda_flash_sm90 takes; among random ones they are rare.
ProblemSpec AlignedSpec(uint64_t seed);

// O and LSE of rows [0, rows) of every head of sequence b, wherever they lie.
std::vector<float> Rows(const OwnedAttention& owned, int64_t b, int64_t rows);
bool SameBits(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace attend::test
