// SPDX-License-Identifier: Apache-2.0
//
// The kernels, by id.

#include <algorithm>
#include <array>

#include "kernels/contract/select.h"

namespace attend {
namespace {

constexpr std::array<KernelInfo, kKernelCount> kKernels = {{
    {KernelId::kCpuReference, "cpu_reference", DeviceKind::kCpu,
     "plain loops in double precision; defines the answer"},
    {KernelId::kCpuFlash, "cpu_flash", DeviceKind::kCpu,
     "tiled online softmax, SIMD chosen at run time, all cores, fp32 accumulation"},
    {KernelId::kCpuFlashAmx, "cpu_flash_amx", DeviceKind::kCpu,
     "the same with both products in AMX tiles; bf16"},
    {KernelId::kCudaNaive, "cuda_naive", DeviceKind::kCuda,
     "materialises the score matrix as standard attention does; O(Lq * Lk) memory"},
    {KernelId::kCudaFlashFp32, "cuda_flash_fp32", DeviceKind::kCuda,
     "tiled online softmax on CUDA cores, exact fp32, O(L) memory"},
    {KernelId::kCudaFlashSm80, "cuda_flash_sm80", DeviceKind::kCuda,
     "mma.sync Tensor Cores, cp.async, fp16 and bf16, every feature; Ampere and later"},
    {KernelId::kCudaFlashSm90, "cuda_flash_sm90", DeviceKind::kCuda,
     "wgmma Tensor Cores, TMA, specialised warps, fp16 and bf16; Hopper"},
    {KernelId::kCudaDecodeSm80, "cuda_decode_sm80", DeviceKind::kCuda,
     "few query rows against long K and V, whose keys are divided among blocks; fp16 and bf16; "
     "Ampere and later"},
    {KernelId::kCudaDecodeSm90, "cuda_decode_sm90", DeviceKind::kCuda,
     "the same with wgmma, faster from 17 query rows of a KV head on; Hopper"},
}};

}  // namespace

std::span<const KernelInfo> Kernels() { return kKernels; }

std::string_view KernelName(KernelId id) { return kKernels[static_cast<size_t>(id)].name; }

bool RoundsWeights(KernelId id) {
  return id == KernelId::kCpuFlashAmx || id == KernelId::kCudaFlashSm80 ||
         id == KernelId::kCudaFlashSm90 || id == KernelId::kCudaDecodeSm80 ||
         id == KernelId::kCudaDecodeSm90;
}
bool RoundsWeights(std::string_view name) {
  const auto kernel = std::find_if(kKernels.begin(), kKernels.end(),
                                   [&](const KernelInfo& info) { return info.name == name; });
  return kernel == kKernels.end() || RoundsWeights(kernel->id);
}

bool ReadsAligned(KernelId id) {
  return id == KernelId::kCudaFlashSm90 || id == KernelId::kCudaDecodeSm80 ||
         id == KernelId::kCudaDecodeSm90;
}

}  // namespace attend
