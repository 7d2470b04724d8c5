// SPDX-License-Identifier: Apache-2.0

#include "kernels/select.h"

#include <array>

namespace attend {
namespace {

constexpr std::array<KernelInfo, kKernelCount> kKernels = {{
    {KernelId::kCpuReference, "cpu_reference", DeviceKind::kCpu,
     "plain loops in double precision; defines the answer"},
    {KernelId::kCpuFlash, "cpu_flash", DeviceKind::kCpu,
     "tiled online softmax, SIMD chosen at run time, all cores, fp32 accumulation"},
    {KernelId::kCudaNaive, "cuda_naive", DeviceKind::kCuda,
     "materialises the score matrix as standard attention does; O(Lq * Lk) memory"},
    {KernelId::kCudaFlashFp32, "cuda_flash_fp32", DeviceKind::kCuda,
     "tiled online softmax on CUDA cores, exact fp32, O(L) memory"},
}};

const KernelInfo* Find(std::string_view name) {
  for (const KernelInfo& kernel : kKernels) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

std::string KernelNames() {
  std::string names = "auto";
  for (const KernelInfo& kernel : kKernels) names += ", " + std::string(kernel.name);
  return names;
}

// fp32 scores of every head and sequence at once, as standard attention keeps them.
Result<int64_t> NaiveWorkspaceBytes(const Problem& p) {
  const Result<int64_t> heads = CheckedProduct("scores", p.batch, p.heads_q, 4);
  if (!heads.ok()) return heads;
  return CheckedProduct("bytes of scores", *heads, p.len_q, p.len_k);
}

Result<Selection> Fit(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                      std::string_view why) {
  Selection selection{kernel.id, why, 0};
  if (kernel.id == KernelId::kCudaNaive) {
    const Result<int64_t> bytes = NaiveWorkspaceBytes(problem);
    if (!bytes.ok() || *bytes > device.workspace_bytes_max) {
      return Unimplemented(
          "kernel cuda_naive keeps the whole score matrix: " +
          (bytes.ok() ? std::to_string(*bytes) + " bytes" : "more than 64 bits can count") +
          ", the limit on " + device.name + " is " + std::to_string(device.workspace_bytes_max));
    }
    selection.workspace_bytes = *bytes;
  }
  return selection;
}

}  // namespace

std::span<const KernelInfo> Kernels() { return kKernels; }

std::string_view KernelName(KernelId id) { return kKernels[static_cast<size_t>(id)].name; }

Result<Selection> Select(const Problem& problem, const DeviceInfo& device,
                         std::string_view forced) {
  if (forced.empty() || forced == "auto") {
    if (device.kind == DeviceKind::kCpu) {
      return Fit(*Find("cpu_flash"), problem, device,
                 "the fast kernel of the CPU takes any problem");
    }
    return Fit(*Find("cuda_flash_fp32"), problem, device, "the CUDA catch-all takes any problem");
  }
  const KernelInfo* kernel = Find(forced);
  if (kernel == nullptr) {
    return InvalidArgument("kernel is \"" + std::string(forced.substr(0, 64)) +
                           "\", must be one of " + KernelNames());
  }
  if (kernel->device != device.kind) {
    return Unimplemented("kernel " + std::string(kernel->name) + " does not run on " + device.name);
  }
  return Fit(*kernel, problem, device, "asked for by name");
}

}  // namespace attend
