// SPDX-License-Identifier: Apache-2.0
//
// Runs one backward pass on the GPU, in every available way, and checks it. O and LSE are the
// attention's. Test code, one thread.

#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/contract/gradients.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/util/status.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

// A kernel, whether there is room for blocks to take turns at dQ, and the shared memory that
// decides its tiles, as in BackwardItem.
struct Way {
  KernelId kernel;
  bool room_for_turns = true;
  int block_bytes_max = 0;
};
// The last two are for the smallest GPUs' 99 KiB. Those between have no tiles of their own.
inline constexpr Way kWays[] = {{KernelId::kCudaFlashFp32},
                                {KernelId::kCudaFlashSm80},
                                {KernelId::kCudaFlashSm90},
                                {KernelId::kCudaFlashSm90, false},
                                {KernelId::kCudaFlashFp32, true, 99 << 10},
                                {KernelId::kCudaFlashSm80, true, 99 << 10}};

std::string NameOf(const Way& way);

// Whether this machine's GPU can compute it this way. For a problem whose blocks take no turns,
// only the way with room for them: without, it is the same.
bool Takes(const Way& way, const Attention& attention, const Gradients& gradients);

// A pass's memory on the device, over several runs. `owned` and `gradients` must outlive it.
class BackwardRun {
 public:
  BackwardRun(OwnedAttention* owned, OwnedGradients* gradients, const Way& way);
  ~BackwardRun();

  Status Prepare();  // all inputs are on the device, and the workspace is poisoned
  Status Launch(cudaStream_t stream);
  const cuda::BackwardItem& item() const;  // once prepared, to be launched beside others
  Status Fetch();                          // the gradients, once the device is idle

 private:
  struct Memory;

  OwnedAttention* const owned_;
  OwnedGradients* const gradients_;
  const Way way_;
  std::unique_ptr<Memory> memory_;
};

// The precision to which it rounds P and dS before multiplying them with rows.
DType FactorsOf(const Way& way, const Problem& problem);

// Copies the gradients back to `gradients`.
Status RunBackward(OwnedAttention* owned, OwnedGradients* gradients, const Way& way);

// Expects the right gradients, and no other writes, if this GPU can compute it.
void ExpectRight(OwnedAttention* owned, OwnedGradients* gradients, const Way& way);

// The same for all ways, with O and LSE from the CPU, so that only the gradients are checked.
void ExpectAllRight(OwnedAttention* owned, uint64_t seed);
void ExpectSpecRight(ProblemSpec spec, uint64_t seed);

// Whether `kernel` supports it, on a GPU that has the kernel.
void ExpectTaken(KernelId kernel, const ProblemSpec& spec, uint64_t seed, bool taken);

// Checks the gradients of every way that supports the problem with `expect`.
inline void ExpectEachWay(OwnedAttention* owned, uint64_t seed,
                          void (*expect)(const Attention&, const Gradients&, const Way&)) {
  CpuReference(owned->attention);
  for (const Way& way : kWays) {
    SCOPED_TRACE(NameOf(way));
    OwnedGradients gradients(owned->attention, seed);
    if (!Takes(way, owned->attention, gradients.get())) continue;
    const Status status = RunBackward(owned, &gradients, way);
    ASSERT_TRUE(status.ok()) << status.ToString();
    expect(owned->attention, gradients.get(), way);
  }
}

}  // namespace attend::test
