// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/cuda_run.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "kernels/contract/select.h"
#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/reference/check_rows.h"

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
  Result<Attention> moved = cuda::Rebase(owned_->Item(Selection{}), {{input}, {output}});
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
  ATTEND_RETURN_IF_ERROR(Launch(config));
  return Fetch();
}

Status DeviceRun::Launch(int config) {
  const cuda::LaunchItem item{kernel_, attention_, config};
  return cuda::LaunchBatch({&item, 1}, workspace_.get(), workspace_bytes_, nullptr);
}

char* DeviceRun::output() const { return Place(owned_->output, output_); }

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
  return Select(attention.problem, device, KernelName(kernel), cuda::TraitsOf(attention)).ok();
}

std::vector<int> Configs(const Problem& problem, KernelId kernel) {
  if (kernel == KernelId::kCudaNaive) return {0};
  int block_bytes_max = 0;
  (void)cudaDeviceGetAttribute(&block_bytes_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  std::vector<int> configs;
  const auto variants = cuda::VariantsFor(kernel, problem);
  for (size_t n = 0; n < variants.size(); ++n) {
    if (variants[n].block_bytes <= block_bytes_max) configs.push_back(static_cast<int>(n));
  }
  return configs;
}

std::string Label(const ProblemSpec& spec, KernelId kernel, int config, uint64_t seed) {
  return std::string(KernelName(kernel)) + " config " + std::to_string(config) + " " +
         Describe(spec) + "\nATTEND_TEST_SEED=" + std::to_string(seed);
}

Status RunAndCheck(const ProblemSpec& spec, KernelId kernel, int config, uint64_t seed,
                   double work) {
  OwnedAttention owned = MakeAttention(spec, seed);
  if (!CanRun(owned.attention, kernel)) return Status();
  Status status = RunOnDevice(&owned, kernel, config);
  if (status.ok()) {
    const RowsReport report = CheckRows(owned.attention, SampleRows(owned.attention, seed, work));
    if (!report.ok) {
      status = Internal(report.detail);
    } else if (!owned.GuardsIntact()) {
      status = Internal("something beside the rows of O and LSE was written");
    }
  }
  if (status.ok()) return status;
  return Status(status.code(), status.message() + "\n" + Label(spec, kernel, config, seed));
}

ProblemSpec AlignedSpec(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](const std::vector<int64_t>& of) { return of[random() % of.size()]; };
  const int64_t heads_kv = pick({1, 2, 3});
  const int64_t dim = pick({64, 96, 128, 192, 256});
  ProblemSpec spec =
      MakeSpec(pick({1, 2}), heads_kv * pick({1, 5, 7}), heads_kv, pick({1, 64, 130, 300}),
               pick({0, 1, 65, 200, 513}), dim, dim == 192 && random() % 2 == 0 ? 128 : dim,
               random() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
  if (random() % 2 == 0) spec.problem.mask.right = 0;
  if (random() % 4 == 0) spec.problem.mask.left = 100;
  if (random() % 4 == 0) spec.problem.softcap = 20.0f;
  if (random() % 4 == 0) {
    for (int64_t b = 0; b < spec.problem.batch; ++b) {
      spec.q_lengths.push_back(static_cast<int64_t>(random() % (spec.problem.len_q + 1)));
      spec.kv_lengths.push_back(static_cast<int64_t>(random() % (spec.problem.len_k + 1)));
    }
    spec.problem.packed = random() % 2 == 0;
  }
  return spec;
}

std::vector<float> Rows(const OwnedAttention& owned, int64_t b, int64_t rows) {
  const Attention& a = owned.attention;
  std::vector<float> values;
  for (int64_t h = 0; h < a.problem.heads_q; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t q_row = SequenceOf(a, b).q_row + i;
      const int64_t base = b * a.o.stride_b + h * a.o.stride_h + q_row * a.o.stride_l;
      for (int64_t d = 0; d < a.problem.dim_v; ++d) {
        values.push_back(LoadElement(a.o.data, a.problem.o_dtype(), base + d));
      }
      if (a.lse != nullptr) {
        values.push_back(a.lse[b * a.lse_stride_b + h * a.lse_stride_h + q_row]);
      }
    }
  }
  return values;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace attend::test
