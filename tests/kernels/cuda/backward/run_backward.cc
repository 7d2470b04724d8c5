// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/cuda/backward/run_backward.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "kernels/contract/gradient_terms.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// Gradients and what they come from, on the device.
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

}  // namespace

std::string NameOf(const Way& way) {
  return std::string(KernelName(way.kernel)) + (way.room_for_turns ? "" : " without turns");
}

Status RunBackward(OwnedAttention* owned, OwnedGradients* gradients, const Way& way) {
  DeviceRun run(owned, KernelId::kCudaFlashFp32);
  ATTEND_RETURN_IF_ERROR(run.Prepare());
  DeviceGradients moved(gradients);
  ATTEND_RETURN_IF_ERROR(moved.Upload());
  const cuda::BackwardItem item{way.kernel, run.attention(), moved.get(), way.room_for_turns};
  const Result<int64_t> bytes = cuda::BackwardWorkspaceBytes({&item, 1});
  if (!bytes.ok()) return bytes.status();
  const DeviceMemory workspace(*bytes + 1);
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(
      cudaMemset(workspace.get(), 0xff, static_cast<size_t>(*bytes)), "poisoning the workspace"));
  ATTEND_RETURN_IF_ERROR(cuda::LaunchBackward({&item, 1}, workspace.get(), *bytes, nullptr));
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaDeviceSynchronize(), "the backward pass"));
  return moved.Fetch();
}

bool Takes(const Way& way, const Attention& a, const Gradients& g) {
  if (way.kernel == KernelId::kCudaFlashFp32) return true;
  if (!way.room_for_turns && !TakesTurns(a.problem)) return false;
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  int major = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  device.compute_capability = 10 * major;
  device.workspace_bytes_max = INT64_MAX;
  return SelectBackward(a.problem, device, KernelName(way.kernel),
                        {.not_tma = cuda::WhyNotTma(a, g)})
      .ok();
}

}  // namespace attend::test
