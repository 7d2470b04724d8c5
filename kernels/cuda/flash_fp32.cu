// SPDX-License-Identifier: Apache-2.0
//
// Chooses and starts a variant of cuda_flash_fp32. Host code, any thread.

#include "kernels/cuda/flash_fp32.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/launch.h"

namespace attend::cuda {
namespace {

constexpr double kLog2EDouble = 1.4426950408889634;

bool IsPlain(const Problem& p) {
  return p.dtype == DType::kFloat32 && p.softcap == 0.0f && !p.has_bias && !p.has_alibi;
}

cudaError_t SharedBytesMax(int* bytes) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// The variant asked for, or the first that fits; null if there is none.
const FlashVariant* Choose(const Problem& problem, int config, int shared_bytes_max) {
  const std::span<const FlashVariant> variants = FlashVariantsFor(problem);
  if (config != kDefaultConfig) {
    return config >= 0 && config < static_cast<int>(variants.size()) ? &variants[config] : nullptr;
  }
  for (const FlashVariant& variant : variants) {
    if (variant.shared_bytes <= shared_bytes_max) return &variant;
  }
  return nullptr;
}

}  // namespace

std::span<const FlashVariant> FlashVariantsFor(const Problem& p) {
  const int dim_max = static_cast<int>(std::max(p.dim, p.dim_v));
  return IsPlain(p) ? PlainFlashVariants(dim_max) : GeneralFlashVariants(dim_max);
}

cudaError_t LaunchFlashFp32(const Attention& attention, int config, cudaStream_t stream) {
  const Problem& p = attention.problem;
  int shared_bytes_max = 0;
  cudaError_t error = SharedBytesMax(&shared_bytes_max);
  if (error != cudaSuccess) return error;
  const FlashVariant* variant = Choose(p, config, shared_bytes_max);
  if (variant == nullptr) return cudaErrorInvalidValue;
  error = cudaFuncSetAttribute(variant->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               variant->shared_bytes);
  if (error != cudaSuccess) return error;
  // The cache is of no use here; without this the driver may leave room for one block only.
  error = cudaFuncSetAttribute(variant->kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;

  // Plain kernels keep raw q.k and fold the scale into the exponent's unit; its sign is applied
  // apart. The general ones apply the scale first.
  double to_log2 = kLog2EDouble;
  if (IsPlain(p)) to_log2 *= std::fabs(static_cast<double>(p.scale));
  float to_log2_rounded = static_cast<float>(to_log2);

  const int64_t tiles = (p.len_q + variant->rows - 1) / variant->rows;
  const int64_t blocks = tiles * p.batch * p.heads_q;
  for (int64_t first = 0; first < blocks; first += kGridBlocksMax) {
    const auto count = static_cast<unsigned>(std::min(blocks - first, kGridBlocksMax));
    void* arguments[] = {const_cast<Attention*>(&attention), &first, &to_log2_rounded};
    error = cudaLaunchKernel(variant->kernel, dim3(count), dim3(variant->threads), arguments,
                             variant->shared_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LoadFlashFp32() {
  for (const int dim_max : {32, 64, 128, 256}) {
    for (const auto& variants : {PlainFlashVariants(dim_max), GeneralFlashVariants(dim_max)}) {
      for (const FlashVariant& variant : variants) {
        cudaFuncAttributes attributes;
        const cudaError_t error = cudaFuncGetAttributes(&attributes, variant.kernel);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace attend::cuda
