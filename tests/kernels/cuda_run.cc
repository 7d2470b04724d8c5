// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/cuda_run.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/batch_layout.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/launch.h"
#include "kernels/select.h"

namespace attend::test {
namespace {

constexpr int kPoison = 0xff;

int64_t WorkspaceBytes(const Attention& attention, KernelId kernel) {
  const cuda::LaunchItem item{kernel, attention};
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes({&item, 1});
  return bytes.ok() ? *bytes : 0;
}

// Room to keep the host span's address modulo the layout's alignment.
int64_t Room(const HostSpan& span) { return span.bytes + cuda::kLayoutAlignment; }

char* Place(const HostSpan& span, const DeviceMemory& memory) {
  return memory.get() + reinterpret_cast<uintptr_t>(span.data) % cuda::kLayoutAlignment;
}

}  // namespace

DeviceMemory::DeviceMemory(int64_t bytes) {
  void* data = nullptr;
  if (cudaMalloc(&data, static_cast<size_t>(bytes)) == cudaSuccess) {
    data_ = static_cast<char*>(data);
  } else {
    (void)cudaGetLastError();
  }
}

DeviceMemory::~DeviceMemory() { (void)cudaFree(data_); }

DeviceRun::DeviceRun(OwnedAttention* owned, KernelId kernel)
    : owned_(owned),
      kernel_(kernel),
      workspace_bytes_(WorkspaceBytes(owned->attention, kernel)),
      input_(Room(owned->input)),
      output_(Room(owned->output)),
      workspace_(workspace_bytes_ + 1) {}

Status DeviceRun::Prepare() {
  if (input_.get() == nullptr || output_.get() == nullptr || workspace_.get() == nullptr) {
    return ResourceExhausted("no device memory for the test");
  }
  char* input = Place(owned_->input, input_);
  char* output = Place(owned_->output, output_);
  Result<Attention> moved = cuda::Rebase(owned_->Item(Selection{}), input, output);
  if (!moved.ok()) return moved.status();
  attention_ = *moved;
  const auto in_bytes = static_cast<size_t>(owned_->input.bytes);
  const auto out_bytes = static_cast<size_t>(owned_->output.bytes);
  cudaError_t error = cudaMemcpy(input, owned_->input.data, in_bytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    error = cudaMemcpy(output, owned_->output.data, out_bytes, cudaMemcpyHostToDevice);
  }
  return cuda::ToStatus(error, "preparing a test run");
}

Status DeviceRun::Fetch() {
  cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) {
    error = cudaMemcpy(owned_->output.data, Place(owned_->output, output_),
                       static_cast<size_t>(owned_->output.bytes), cudaMemcpyDeviceToHost);
  }
  if (error != cudaSuccess) (void)cudaGetLastError();
  return cuda::ToStatus(error, "a test run");
}

Status DeviceRun::Run(int config) {
  ATTEND_RETURN_IF_ERROR(Prepare());
  // All but the tile queue, which every launch finds and leaves at zero.
  const auto bytes = static_cast<size_t>(workspace_bytes_);
  cudaError_t error = cudaMemset(workspace_.get(), kPoison, bytes);
  if (error == cudaSuccess) {
    error = cudaMemset(workspace_.get(), 0,
                       std::min(bytes, static_cast<size_t>(cuda::kTileQueueBytes)));
  }
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(error, "clearing the workspace"));
  const cuda::LaunchItem item{kernel_, attention_, config};
  ATTEND_RETURN_IF_ERROR(
      cuda::LaunchBatch({&item, 1}, workspace_.get(), workspace_bytes_, nullptr));
  return Fetch();
}

Status RunOnDevice(OwnedAttention* owned, KernelId kernel, int config) {
  owned->ResetOutput();
  return DeviceRun(owned, kernel).Run(config);
}

bool CanRun(const Attention& attention, KernelId kernel) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.workspace_bytes_max = INT64_MAX;
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  device.compute_capability = 10 * major + minor;
  return Select(attention.problem, device, KernelName(kernel),
                {.tma_aligned = cuda::TmaAligned(attention)})
      .ok();
}

std::vector<int> Configs(const Problem& problem, KernelId kernel) {
  if (kernel == KernelId::kCudaNaive) return {0};
  int shared_bytes_max = 0;
  (void)cudaDeviceGetAttribute(&shared_bytes_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  std::vector<int> configs;
  const auto variants = cuda::VariantsFor(kernel, problem);
  for (size_t n = 0; n < variants.size(); ++n) {
    if (variants[n].shared_bytes <= shared_bytes_max) configs.push_back(static_cast<int>(n));
  }
  return configs;
}

}  // namespace attend::test
