// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/cuda/backward/run_backward.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/contract/gradient_terms.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// Gradients and their inputs, on the device.
class DeviceGradients {
 public:
  explicit DeviceGradients(OwnedGradients* owned) : owned_(owned), gradients_(owned->get()) {
    for (const std::vector<std::byte>& block : owned->blocks()) {
      blocks_.push_back(std::make_unique<DeviceMemory>(Room(block)));
    }
    gradients_.d_o.data = Moved(gradients_.d_o.data);
    gradients_.d_lse = Moved(gradients_.d_lse);
    gradients_.d_q.data = Moved(gradients_.d_q.data);
    gradients_.d_k.data = Moved(gradients_.d_k.data);
    gradients_.d_v.data = Moved(gradients_.d_v.data);
    gradients_.d_bias.data = Moved(gradients_.d_bias.data);
    gradients_.d_sinks = Moved(gradients_.d_sinks);
  }

  const Gradients& get() const { return gradients_; }

  Status Upload() { return Copy(cudaMemcpyHostToDevice); }
  Status Fetch() { return Copy(cudaMemcpyDeviceToHost); }

 private:
  static int64_t Room(const std::vector<std::byte>& block) {
    return static_cast<int64_t>(block.size()) + 1;
  }

  // Where a host address of the blocks is on the device; null stays null.
  template <class T>
  T* Moved(T* host) const {
    const auto* const at = reinterpret_cast<const std::byte*>(host);
    for (size_t n = 0; host != nullptr && n < blocks_.size(); ++n) {
      const std::vector<std::byte>& block = owned_->blocks()[n];
      if (at < block.data() || at >= block.data() + block.size()) continue;
      return reinterpret_cast<T*>(blocks_[n]->get() + (at - block.data()));
    }
    return nullptr;
  }

  Status Copy(cudaMemcpyKind kind) {
    for (size_t n = 0; n < blocks_.size(); ++n) {
      void* const host = owned_->blocks()[n].data();
      void* const device = blocks_[n]->get();
      const bool up = kind == cudaMemcpyHostToDevice;
      const cudaError_t error =
          cudaMemcpy(up ? device : host, up ? host : device, owned_->blocks()[n].size(), kind);
      ATTEND_RETURN_IF_ERROR(cuda::ToStatus(error, "copying gradients"));
    }
    return Status();
  }

  OwnedGradients* const owned_;
  Gradients gradients_;
  std::vector<std::unique_ptr<DeviceMemory>> blocks_;
};

int ComputeCapabilityMajor() {
  int major = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major;
}

}  // namespace

std::string NameOf(const Way& way) {
  return std::string(KernelName(way.kernel)) + (way.room_for_turns ? "" : " without turns") +
         (way.block_bytes_max == 0 ? "" : " in small tiles");
}

struct BackwardRun::Memory {
  Memory(OwnedAttention* owned, OwnedGradients* owned_gradients)
      : run(owned, KernelId::kCudaFlashFp32), gradients(owned_gradients) {}

  DeviceRun run;
  DeviceGradients gradients;
  cuda::BackwardItem item{};
  std::unique_ptr<DeviceMemory> workspace;
  int64_t workspace_bytes = 0;
};

BackwardRun::BackwardRun(OwnedAttention* owned, OwnedGradients* gradients, const Way& way)
    : owned_(owned),
      gradients_(gradients),
      way_(way),
      memory_(std::make_unique<Memory>(owned_, gradients_)) {}

BackwardRun::~BackwardRun() = default;

Status BackwardRun::Prepare() {
  Memory& m = *memory_;
  ATTEND_RETURN_IF_ERROR(m.run.Prepare());
  ATTEND_RETURN_IF_ERROR(m.gradients.Upload());
  m.item = {way_.kernel, m.run.attention(), m.gradients.get(), way_.room_for_turns,
            way_.block_bytes_max};
  const Result<int64_t> bytes = cuda::BackwardWorkspaceBytes({&m.item, 1});
  if (!bytes.ok()) return bytes.status();
  m.workspace_bytes = *bytes;
  m.workspace = std::make_unique<DeviceMemory>(*bytes + 1);
  ATTEND_RETURN_IF_ERROR(
      cuda::ToStatus(cudaMemset(m.workspace->get(), 0xff, static_cast<size_t>(*bytes)),
                     "poisoning the workspace"));
  return cuda::ToStatus(cudaDeviceSynchronize(), "preparing the backward pass");
}

Status BackwardRun::Launch(cudaStream_t stream) {
  const Memory& m = *memory_;
  return cuda::LaunchBackward({&m.item, 1}, m.workspace->get(), m.workspace_bytes, stream);
}

const cuda::BackwardItem& BackwardRun::item() const { return memory_->item; }

Status BackwardRun::Fetch() { return memory_->gradients.Fetch(); }

Status RunBackward(OwnedAttention* owned, OwnedGradients* gradients, const Way& way) {
  BackwardRun run(owned, gradients, way);
  ATTEND_RETURN_IF_ERROR(run.Prepare());
  ATTEND_RETURN_IF_ERROR(run.Launch(nullptr));
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaDeviceSynchronize(), "the backward pass"));
  return run.Fetch();
}

DType FactorsOf(const Way& way, const Problem& p) {
  return way.kernel == KernelId::kCudaFlashFp32 ? DType::kFloat32 : p.dtype;
}

void ExpectRight(OwnedAttention* owned, OwnedGradients* gradients, const Way& way) {
  SCOPED_TRACE(NameOf(way));
  const Attention& a = owned->attention;
  ASSERT_TRUE(Check(a, gradients->get()).ok());
  if (!Takes(way, a, gradients->get())) return;
  const Status status = RunBackward(owned, gradients, way);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(GradientsJudge(a, gradients->get(), FactorsOf(way, a.problem)).Fault(gradients->get()),
            "");
  EXPECT_TRUE(gradients->GuardsIntact()) << "wrote outside its rows";
}

void ExpectAllRight(OwnedAttention* owned, uint64_t seed) {
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  CpuReference(owned->attention);
  for (const Way& way : kWays) {
    OwnedGradients gradients(owned->attention, seed + 1);
    ExpectRight(owned, &gradients, way);
  }
}

void ExpectSpecRight(ProblemSpec spec, uint64_t seed) {
  spec.problem.return_lse = true;
  SCOPED_TRACE(Describe(spec));
  OwnedAttention owned = MakeAttention(spec, seed);
  ExpectAllRight(&owned, seed);
}

void ExpectTaken(KernelId kernel, const ProblemSpec& spec, uint64_t seed, bool taken) {
  const int major = ComputeCapabilityMajor();
  if (kernel == KernelId::kCudaFlashSm90 ? major != 9 : major < 8) return;
  OwnedAttention owned = MakeAttention(spec, seed);
  OwnedGradients gradients(owned.attention, seed);
  EXPECT_EQ(Takes(Way{kernel}, owned.attention, gradients.get()), taken)
      << KernelName(kernel) << ", " << Describe(spec);
}

bool Takes(const Way& way, const Attention& a, const Gradients& g) {
  if (way.kernel == KernelId::kCudaFlashFp32) return true;
  if (!way.room_for_turns && !TakesTurns(a.problem)) return false;
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.compute_capability = 10 * ComputeCapabilityMajor();
  device.workspace_bytes_max = INT64_MAX;
  return SelectBackward(a.problem, device, KernelName(way.kernel),
                        {.not_tma = cuda::WhyNotTma(a, g)})
      .ok();
}

}  // namespace attend::test
