// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/lane_harness.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <future>
#include <utility>

#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::test {

Result<std::unique_ptr<LaneHarness>> LaneHarness::Make() {
  const Result<DeviceInfo> info = cuda::ReadDeviceInfo(0, BackendOptions{});
  if (!info.ok()) return info.status();
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaSetDevice(0), "opening the device"));
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cuda::LoadKernels(), "loading kernels"));
  std::unique_ptr<LaneHarness> harness(new LaneHarness(*info));
  ATTEND_RETURN_IF_ERROR(harness->pool_.Open(0));
  return harness;
}

Result<std::unique_ptr<Lane>> LaneHarness::MakeLane(const cuda::LaneTuning& tuning,
                                                    int64_t workspace_bytes,
                                                    cuda::PhaseSink timeline) {
  return cuda::CudaLane::Make({info_, poller_, pool_, pinned_, tuning, std::move(timeline)},
                              {workspace_bytes});
}

Result<Selection> LaneHarness::Choose(const Attention& attention, std::string_view kernel) const {
  return Select(attention.problem, info_, kernel, cuda::TraitsOf(attention));
}

PinnedBlock::PinnedBlock(int64_t bytes, cuda::PinnedRanges* ranges) : ranges_(ranges) {
  void* data = nullptr;
  const cudaError_t error = cudaHostAlloc(&data, static_cast<size_t>(bytes + 1),
                                          cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  data_ = static_cast<char*>(data);
  if (ranges_ != nullptr) ranges_->Add(data_, bytes);
}

PinnedBlock::~PinnedBlock() {
  if (data_ == nullptr) return;
  if (ranges_ != nullptr) ranges_->Remove(data_);
  (void)cudaFreeHost(data_);
}

PinnedAttention::PinnedAttention(OwnedAttention* owned, cuda::PinnedRanges* ranges, int64_t shift)
    : owned_(owned),
      shift_(shift),
      input_(owned->input.bytes + shift, ranges),
      output_(owned->output.bytes + shift, ranges) {
  if (!ok()) return;
  std::memcpy(input_.get() + shift, owned->input.data, static_cast<size_t>(owned->input.bytes));
  std::memcpy(output_.get() + shift, owned->output.data, static_cast<size_t>(owned->output.bytes));
}

WorkItem PinnedAttention::Item(const Selection& selection) const {
  WorkItem item = owned_->Item(selection);
  char* const input = input_.get() + shift_;
  char* const output = output_.get() + shift_;
  const Result<Attention> moved = cuda::Rebase(item, {{input}, {output}});
  if (moved.ok()) item.attention = *moved;
  item.inputs = {{input, owned_->input.bytes}};
  item.outputs = {{output, owned_->output.bytes}};
  return item;
}

void PinnedAttention::Fetch() const {
  std::memcpy(owned_->output.data, output_.get() + shift_,
              static_cast<size_t>(owned_->output.bytes));
}

Result<BatchOutcome> RunBatch(Lane* lane, std::span<const WorkItem> items) {
  std::promise<BatchOutcome> ended;
  ATTEND_RETURN_IF_ERROR(
      lane->Submit(items, [&ended](BatchOutcome outcome) { ended.set_value(std::move(outcome)); }));
  return ended.get_future().get();
}

}  // namespace attend::test
