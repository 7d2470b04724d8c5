// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/cuda/lane/cuda_lane.h"
#include "kernels/cuda/lane/cuda_staging.h"
#include "kernels/cuda/lane/cut_plan.h"
#include "kernels/cuda/lane/lane_memory.h"
#include "kernels/cuda/lane/lane_tuning.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/runtime/completion_poller.h"
#include "kernels/cuda/runtime/cuda_arena.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/runtime/ipc_memory.h"
#include "kernels/cuda/runtime/pinned_allocator.h"
#include "kernels/cuda/runtime/pinned_ranges.h"

namespace attend {
namespace cuda {
namespace {

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(DeviceInfo info)
      : info_(std::move(info)),
        allocator_(info_.index, pinned_),
        ipc_(info_),
        staging_(info_, pool_),
        poller_(info_.index) {}

  Status Open() {
    ATTEND_RETURN_IF_ERROR(pool_.Open(info_.index));
    return staging_.Open();
  }

  const DeviceInfo& info() const override { return info_; }
  HostAllocator& host_allocator() override { return allocator_; }

  Result<std::unique_ptr<Lane>> MakeLane(const LaneOptions& options) override {
    if (options.workspace_bytes < 0) {
      return InvalidArgument("lane workspace is " + std::to_string(options.workspace_bytes) +
                             " bytes, must be at least 0");
    }
    return CudaLane::Make({info_, poller_, pool_, pinned_}, options);
  }
  bool RunsInParts(const Attention& attention, const Selection& selection) const override {
    return !PlanParts(attention, selection.kernel, LaneTuning().cut).empty();
  }
  bool Gathers() const override { return allocator_.same_address(); }
  DeviceMemoryUse memory_use() const override {
    return {pool_.used_bytes(), info_.memory_bytes - arena_bytes_};
  }

  Result<ImportedMemory> ImportMemory(std::string_view handle) override {
    return ipc_.Import(handle);
  }
  void ReleaseMemory(char* data) override { ipc_.Release(data); }
  Result<std::unique_ptr<DeviceEvent>> ImportEvent(std::string_view handle) override {
    return ipc_.ImportEvent(handle);
  }

  Result<std::unique_ptr<DeviceArena>> MakeArena(int64_t bytes) override {
    Result<std::unique_ptr<DeviceArena>> arena = CudaArena::Make(info_, poller_, bytes);
    if (arena.ok()) arena_bytes_ += bytes;
    return arena;
  }

  bool CanStage() const override { return staging_.can_stage(); }
  Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host,
                                               std::shared_ptr<void> owner) override {
    return staging_.Make(host, std::move(owner), poller_);
  }

 private:
  const DeviceInfo info_;
  std::atomic<int64_t> arena_bytes_{0};  // never falls: arenas live as long as the backend is used
  PinnedRanges pinned_;
  PinnedAllocator allocator_;
  DevicePool pool_;
  IpcMemory ipc_;
  StagingStream staging_;
  CompletionPoller poller_;
};

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<Backend>> MakeCudaBackend(int index, const BackendOptions& options) {
  Result<DeviceInfo> info = cuda::ReadDeviceInfo(index, options);
  if (!info.ok()) return info.status();
  const std::string where = "opening " + info->name;
  cudaError_t error = cudaSetDevice(index);
  // Now rather than in the first request: create the context, and load the kernels' code.
  if (error == cudaSuccess) error = cuda::LoadKernels();
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Internal(cuda::ErrorText(error, where));
  }
  auto backend = std::make_unique<cuda::CudaBackend>(*std::move(info));
  ATTEND_RETURN_IF_ERROR(backend->Open());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace attend
